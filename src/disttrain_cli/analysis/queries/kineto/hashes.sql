-- A hash of the events of files ($files) that is equal if these are.
SELECT file, sum(hash(name, start_ns, duration_ns, stream, correlation, external_id)::HUGEINT) AS content
FROM raw_events
WHERE file IN (SELECT unnest($files))
GROUP BY file;
