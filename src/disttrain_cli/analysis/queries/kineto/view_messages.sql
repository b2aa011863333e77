-- Both ends of matched messages.
CREATE VIEW matched_messages AS
WITH ends AS (
    SELECT w.*, m.source, m.destination FROM waits w JOIN messages m USING (place) WHERE w.message)
SELECT s.step, s.process_group, s.index, s.rank AS sender, r.rank AS receiver, s.came_ns AS sent_ns,
       r.came_ns AS asked_ns, r.came_ns + r.end_ns - r.start_ns AS received_ns, r.wait_ns / 1e3 AS waited_us,
       r.transfer_ns / 1e3 AS transfer_us
FROM ends s JOIN ends r ON r.collective = s.collective AND r.rank = r.destination
WHERE s.rank = s.source;
