-- Create `trace` from the recorded rows and correct the times in `seen`: all on the clock of rank 0's host.
CREATE VIEW trace AS
SELECT r.* REPLACE (start_ns - shift_ns AS start_ns, end_ns - shift_ns AS end_ns)
FROM (SELECT r.*, if(c.applied, clock_shift(r.start_ns, c.offset_us, c.drift_ppm), 0) AS shift_ns
      FROM recorded r JOIN clocks c USING (host)) r;
UPDATE seen SET first_ns = first_ns - clock_shift(first_ns, c.offset_us, c.drift_ppm),
    latest_ns = latest_ns - clock_shift(latest_ns, c.offset_us, c.drift_ppm),
    start_ns = start_ns - clock_shift(start_ns, c.offset_us, c.drift_ppm),
    end_ns = end_ns - clock_shift(end_ns, c.offset_us, c.drift_ppm),
    compute_end_ns = compute_end_ns - clock_shift(compute_end_ns, c.offset_us, c.drift_ppm)
FROM clocks c WHERE c.host = seen.host AND c.applied;
