-- Tables that are filled while files are read; strings are numbers of `names`, `categories`, `threads` and `calls`.
CREATE TABLE files (file INTEGER, name VARCHAR, rank INTEGER, world_size BIGINT, first_ns BIGINT, last_ns BIGINT,
                    events BIGINT, kept BOOLEAN);
CREATE TABLE names (id INTEGER, name VARCHAR);
CREATE TABLE categories (id INTEGER, name VARCHAR, class INTEGER);
CREATE TABLE threads (id INTEGER, process VARCHAR, thread VARCHAR, thread_name VARCHAR);
CREATE TABLE calls (id INTEGER, collective VARCHAR, process_group VARCHAR, description VARCHAR, members VARCHAR,
                    size BIGINT, elements BIGINT, dtype VARCHAR);
CREATE TABLE kinds (name INTEGER, kind VARCHAR, operation VARCHAR);
CREATE TABLE raw_memory (file INTEGER, at_ns BIGINT, device_type BIGINT, device BIGINT, allocated_bytes BIGINT,
                         reserved_bytes BIGINT);
CREATE TABLE warnings (warning VARCHAR);
CREATE TABLE raw_events (file INTEGER, category INTEGER, name INTEGER, thread INTEGER, start_ns BIGINT,
                         duration_ns BIGINT, device BIGINT, stream BIGINT, correlation BIGINT, external_id BIGINT,
                         bytes BIGINT, call INTEGER);
CREATE TABLE marks AS SELECT *, 0::UTINYINT AS phase FROM raw_events;
