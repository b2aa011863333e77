-- Known work of a device in the analysed files: kernels; else the events that the user's patterns name (by_user); else
-- nothing. Columns: how
CREATE TABLE understood AS
SELECT CASE WHEN coalesce(bool_or(c.class = 1), false) THEN 'kernels'
            WHEN coalesce(bool_or(k.by_user AND c.class IN (0, 3, 5)), false) THEN 'user' ELSE 'nothing' END AS how
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept
JOIN categories c ON c.id = e.category
LEFT JOIN kinds k ON k.name = e.name;
