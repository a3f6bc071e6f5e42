-- payloads only
WITH sa_jobs_added AS
(INSERT INTO sa_jobs (queue, handler, payload, priority, max_attempts, run_at) SELECT %(queue)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, given.payload AS payload, %(priority)s::SMALLINT AS anon_3, %(max_attempts)s::BIGINT AS anon_4, now() AS anon_5
FROM unnest(CAST(array((SELECT jsonb_array_elements(CAST(%(payload)s::VARCHAR AS JSONB)) AS element)) AS JSONB[])) WITH ORDINALITY AS given(payload, position) ORDER BY given.position RETURNING sa_jobs.id)
 SELECT CAST(json_agg(sa_jobs_added.id) AS TEXT) AS json_agg_1
FROM sa_jobs_added

-- a common time
WITH sa_jobs_added AS
(INSERT INTO sa_jobs (queue, handler, payload, priority, run_at, max_attempts) SELECT %(queue)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, given.payload AS payload, %(priority)s::SMALLINT AS anon_3, coalesce(%(run_at)s::TIMESTAMP WITH TIME ZONE, now() + make_interval(0, 0, 0, 0, 0, 0, %(delay)s)) AS anon_4, %(max_attempts)s::BIGINT AS anon_5
FROM unnest(CAST(array((SELECT jsonb_array_elements(CAST(%(payload)s::VARCHAR AS JSONB)) AS element)) AS JSONB[])) WITH ORDINALITY AS given(payload, position) ORDER BY given.position RETURNING sa_jobs.id)
 SELECT CAST(json_agg(sa_jobs_added.id) AS TEXT) AS json_agg_1
FROM sa_jobs_added

-- keys and times
WITH sa_jobs_added AS
(INSERT INTO sa_jobs (queue, handler, payload, priority, run_at, max_attempts, idempotency_key, unique_key) SELECT %(queue)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, given.payload AS payload, %(priority)s::SMALLINT AS anon_3, coalesce(given.run_at, now() + make_interval(0, 0, 0, 0, 0, 0, given.delay)) AS anon_4, %(max_attempts)s::BIGINT AS anon_5, given.idempotency_key AS idempotency_key, given.unique_key AS unique_key
FROM unnest(CAST(array((SELECT jsonb_array_elements(CAST(%(payload)s::VARCHAR AS JSONB)) AS element)) AS JSONB[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(run_at)s::VARCHAR AS JSONB)) AS element)) AS TIMESTAMP WITH TIME ZONE[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(idempotency_key)s::VARCHAR AS JSONB)) AS element)) AS TEXT[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(unique_key)s::VARCHAR AS JSONB)) AS element)) AS TEXT[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(delay)s::VARCHAR AS JSONB)) AS element)) AS DOUBLE PRECISION[])) WITH ORDINALITY AS given(payload, run_at, idempotency_key, unique_key, delay, position) ORDER BY given.position ON CONFLICT DO NOTHING RETURNING sa_jobs.id, sa_jobs.idempotency_key, sa_jobs.unique_key)
 SELECT CAST(json_agg(json_build_array(sa_jobs_added.id, sa_jobs_added.idempotency_key, sa_jobs_added.unique_key)) AS TEXT) AS json_agg_1
FROM sa_jobs_added

-- with ids
WITH sa_jobs_added AS
(INSERT INTO sa_jobs (queue, handler, payload, priority, max_attempts, idempotency_key, unique_key, run_at, id) SELECT %(queue)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, given.payload AS payload, %(priority)s::SMALLINT AS anon_3, %(max_attempts)s::BIGINT AS anon_4, given.idempotency_key AS idempotency_key, given.unique_key AS unique_key, now() AS anon_5, given.id AS id
FROM unnest(CAST(array((SELECT jsonb_array_elements(CAST(%(payload)s::VARCHAR AS JSONB)) AS element)) AS JSONB[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(idempotency_key)s::VARCHAR AS JSONB)) AS element)) AS TEXT[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(unique_key)s::VARCHAR AS JSONB)) AS element)) AS TEXT[]), CAST(array((SELECT jsonb_array_elements_text(CAST(%(id)s::VARCHAR AS JSONB)) AS element)) AS BIGINT[])) WITH ORDINALITY AS given(payload, idempotency_key, unique_key, id, position) ORDER BY given.position ON CONFLICT DO NOTHING RETURNING sa_jobs.id, sa_jobs.idempotency_key, sa_jobs.unique_key)
 SELECT CAST(json_agg(sa_jobs_added.id) AS TEXT) AS json_agg_1
FROM sa_jobs_added

-- with meta
WITH sa_jobs_added AS
(INSERT INTO sa_jobs (queue, handler, payload, priority, max_attempts, run_at, meta) SELECT %(queue)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, given.payload AS payload, %(priority)s::SMALLINT AS anon_3, %(max_attempts)s::BIGINT AS anon_4, now() AS anon_5, CAST(%(meta)s::VARCHAR AS JSONB) AS anon_6
FROM unnest(CAST(array((SELECT jsonb_array_elements(CAST(%(payload)s::VARCHAR AS JSONB)) AS element)) AS JSONB[])) WITH ORDINALITY AS given(payload, position) ORDER BY given.position RETURNING sa_jobs.id)
 SELECT CAST(json_agg(sa_jobs_added.id) AS TEXT) AS json_agg_1
FROM sa_jobs_added
