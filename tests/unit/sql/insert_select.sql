-- payload only
INSERT INTO sa_jobs (queue, handler, payload, priority, tenant, run_at, max_attempts, idempotency_key, unique_key) SELECT %(queue)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, jsonb_build_object(%(param_1)s::VARCHAR, source.id, %(param_2)s::VARCHAR, source.due) AS anon_3, %(priority)s::SMALLINT AS anon_4, %(tenant)s::VARCHAR AS anon_5, coalesce(%(run_at)s::TIMESTAMP WITH TIME ZONE, now() + make_interval(0, 0, 0, 0, 0, 0, %(delay)s)) AS anon_6, %(max_attempts)s::BIGINT AS anon_7, %(idempotency_key)s::VARCHAR AS anon_8, %(unique_key)s::VARCHAR AS anon_9
FROM (SELECT invoices.id AS id, invoices.due AS due
FROM invoices) AS source
WHERE true ON CONFLICT DO NOTHING

-- every option
INSERT INTO sa_jobs (queue, handler, payload, priority, tenant, run_at, max_attempts, idempotency_key, unique_key) SELECT coalesce(source.sa_jobs_queue, %(queue)s::VARCHAR) AS coalesce_1, %(handler)s::VARCHAR AS anon_1, jsonb_build_object(%(param_1)s::VARCHAR, source.id) AS anon_2, coalesce(source.sa_jobs_priority, %(priority)s::SMALLINT) AS coalesce_2, coalesce(source.sa_jobs_tenant, %(tenant)s::VARCHAR) AS coalesce_3, coalesce(coalesce(source.sa_jobs_run_at, %(run_at)s::TIMESTAMP WITH TIME ZONE), now() + make_interval(0, 0, 0, 0, 0, 0, %(delay)s)) AS anon_3, %(max_attempts)s::BIGINT AS anon_4, coalesce(source.sa_jobs_idempotency_key, %(idempotency_key)s::VARCHAR) AS coalesce_4, coalesce(source.sa_jobs_unique_key, %(unique_key)s::VARCHAR) AS coalesce_5
FROM (SELECT invoices.id AS id, invoices.customer AS sa_jobs_queue, invoices.customer AS sa_jobs_priority, invoices.customer AS sa_jobs_run_at, invoices.customer AS sa_jobs_tenant, invoices.customer AS sa_jobs_idempotency_key, invoices.customer AS sa_jobs_unique_key
FROM invoices) AS source
WHERE true ON CONFLICT DO NOTHING
