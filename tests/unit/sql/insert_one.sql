-- without options
INSERT INTO sa_jobs (queue, handler, payload, priority, run_at, max_attempts) VALUES (%(queue)s::VARCHAR, %(handler)s::VARCHAR, CAST(%(payload)s::VARCHAR AS JSONB), %(priority)s::SMALLINT, now(), %(max_attempts)s::BIGINT) RETURNING sa_jobs.id

-- with a time
INSERT INTO sa_jobs (queue, handler, payload, priority, run_at, max_attempts) VALUES (%(queue)s::VARCHAR, %(handler)s::VARCHAR, CAST(%(payload)s::VARCHAR AS JSONB), %(priority)s::SMALLINT, coalesce(%(run_at)s::TIMESTAMP WITH TIME ZONE, now() + make_interval(0, 0, 0, 0, 0, 0, %(delay)s)), %(max_attempts)s::BIGINT) RETURNING sa_jobs.id

-- with keys
INSERT INTO sa_jobs (queue, handler, payload, priority, run_at, max_attempts, idempotency_key, unique_key) VALUES (%(queue)s::VARCHAR, %(handler)s::VARCHAR, CAST(%(payload)s::VARCHAR AS JSONB), %(priority)s::SMALLINT, now(), %(max_attempts)s::BIGINT, %(idempotency_key)s::VARCHAR, %(unique_key)s::VARCHAR) ON CONFLICT DO NOTHING RETURNING sa_jobs.id

-- with meta
INSERT INTO sa_jobs (queue, handler, payload, priority, run_at, max_attempts, meta) VALUES (%(queue)s::VARCHAR, %(handler)s::VARCHAR, CAST(%(payload)s::VARCHAR AS JSONB), %(priority)s::SMALLINT, now(), %(max_attempts)s::BIGINT, CAST(%(meta)s::VARCHAR AS JSONB)) RETURNING sa_jobs.id
