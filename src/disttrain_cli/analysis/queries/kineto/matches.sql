-- Sends and receives: their two ends, if arguments name the peer, or the group or the job has two ranks only. A batch
-- of them (coalesced) names none.
CREATE TABLE messages AS
WITH found AS (
    SELECT k.rowid AS place, k.rank, lower(coalesce(nullif(c.collective, ''), k.operation)) AS does, c.source,
           c.destination, TRY_CAST(regexp_extract_all(c.members, '\d+') AS BIGINT[]) AS members
    FROM raw_kernels k
    LEFT JOIN calls c ON c.id = k.call
    WHERE k.kind = 'communication' AND k.measured
      AND lower(coalesce(nullif(c.collective, ''), k.operation))
          IN ('send', 'recv', 'coalesced', 'batch_isend_irecv')),
known AS (
    SELECT place, rank, does,
           CASE WHEN does = 'send' AND destination >= 0 THEN destination
                WHEN does = 'recv' AND source >= 0 THEN source
                WHEN len(members) = 2 AND list_contains(members, rank) THEN members[1] + members[2] - rank
                WHEN coalesce(len(members), 0) = 0 AND rank < 2
                     AND (SELECT max(world_size) FROM files WHERE kept) = 2 THEN 1 - rank END AS peer
    FROM found)
SELECT place, CASE does WHEN 'send' THEN rank WHEN 'recv' THEN peer END AS source,
       CASE does WHEN 'send' THEN peer WHEN 'recv' THEN rank END AS destination
FROM known;
-- One row per rank and collective: the same operation of the same group with the same ordinal in the step, only if
-- every rank in it has it equally often (even). A message is a collective of two: a send and its receive, with the same
-- ordinal among the group's messages from this rank to that one.
CREATE TABLE joined AS
WITH parts AS (
    SELECT k.rowid AS place, k.rank, k.step, k.start_ns, k.end_ns, k.operation,
           CASE WHEN coalesce(c.process_group, '') <> '' THEN c.process_group ELSE 'stream' END AS process_group,
           coalesce(c.members, '') AS members, c.size, m.place IS NOT NULL AS message,
           CASE WHEN m.place IS NOT NULL THEN 'message ' || m.source || ' → ' || m.destination
                ELSE coalesce(nullif(c.collective, ''), k.operation, 'collective') END AS name
    FROM raw_kernels k
    LEFT JOIN calls c ON c.id = k.call
    LEFT JOIN messages m ON m.place = k.rowid
    WHERE k.kind = 'communication' AND k.measured
      AND (m.place IS NULL OR (m.source IS NOT NULL AND m.destination IS NOT NULL AND m.source <> m.destination))),
numbered AS (
    SELECT *, row_number() OVER (PARTITION BY rank, step, process_group, members, name
                                 ORDER BY start_ns, end_ns, place) - 1 AS index,
           count(*) OVER (PARTITION BY rank, step, process_group, members, name) AS own
    FROM parts)
SELECT *, dense_rank() OVER (ORDER BY step, process_group, members, name, index) AS collective,
       count(*) OVER same AS ranks,
       min(own) OVER (PARTITION BY step, process_group, members, name)
           = max(own) OVER (PARTITION BY step, process_group, members, name) AS even
FROM numbered
WINDOW same AS (PARTITION BY step, process_group, members, name, index);
