-- Tables that are filled while files are read; strings are numbers of `names`, `categories`, `threads` and `calls`.
-- step: of an annotation of a step (step_num), iteration: the one of an event by its arguments; -1: none.
-- A file of several ranks is several here; holds: number of ranks that cannot be separated. Times that count from the
-- file's base_ns were moved by shift_ns, to one clock for all.
CREATE TABLE files (file INTEGER, name VARCHAR, rank INTEGER, world_size BIGINT, first_ns BIGINT, last_ns BIGINT,
                    events BIGINT, kept BOOLEAN, base_ns BIGINT, shift_ns BIGINT, holds BIGINT);
CREATE TABLE names (id INTEGER, name VARCHAR);
CREATE TABLE categories (id INTEGER, name VARCHAR, class INTEGER);
CREATE TABLE threads (id INTEGER, file INTEGER, process VARCHAR, thread VARCHAR, thread_name VARCHAR);
CREATE TABLE calls (id INTEGER, collective VARCHAR, process_group VARCHAR, description VARCHAR, members VARCHAR,
                    size BIGINT, elements BIGINT, dtype VARCHAR, source BIGINT, destination BIGINT);
CREATE TABLE shapes (id INTEGER, name INTEGER, dims VARCHAR, dtype VARCHAR, flops DOUBLE, bytes DOUBLE);
CREATE TABLE item_bytes (dtype VARCHAR, bytes BIGINT);
CREATE TABLE devices (file INTEGER, name VARCHAR);
-- Classification of names: kinds of kernels (by_user: by the user's patterns), and marks of steps.
CREATE TABLE kinds (name INTEGER, kind VARCHAR, operation VARCHAR, by_user BOOLEAN);
CREATE TABLE step_names (name INTEGER, line INTEGER, number BIGINT, edge VARCHAR);
CREATE TABLE raw_memory (file INTEGER, thread INTEGER, at_ns BIGINT, device_type BIGINT, device BIGINT,
                         allocated_bytes BIGINT, reserved_bytes BIGINT);
CREATE TABLE warnings (warning VARCHAR);
CREATE TABLE raw_events (file INTEGER, category INTEGER, name INTEGER, thread INTEGER, start_ns BIGINT,
                         duration_ns BIGINT, device BIGINT, stream BIGINT, correlation BIGINT, external_id BIGINT,
                         bytes BIGINT, step BIGINT, iteration BIGINT, call INTEGER, shape INTEGER);
CREATE TABLE marks AS SELECT *, 0::UTINYINT AS phase FROM raw_events;
