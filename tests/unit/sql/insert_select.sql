-- payload only
INSERT INTO sa_jobs (queue, handler, payload, priority, tenant, run_at, max_attempts, idempotency_key, unique_key) SELECT %(sa_jobs_queue_1)s::VARCHAR AS anon_1, %(sa_jobs_handler_1)s::VARCHAR AS anon_2, jsonb_build_object(%(sa_jobs_key_1)s::VARCHAR, sa_jobs_source.id, %(sa_jobs_key_2)s::VARCHAR, sa_jobs_source.due) AS anon_3, %(sa_jobs_priority_1)s::SMALLINT AS anon_4, %(sa_jobs_tenant_1)s::VARCHAR AS anon_5, coalesce(%(sa_jobs_run_at_1)s::TIMESTAMP WITH TIME ZONE, now() + make_interval(0, 0, 0, 0, 0, 0, %(sa_jobs_delay_1)s)) AS anon_6, %(sa_jobs_max_attempts_1)s::BIGINT AS anon_7, %(sa_jobs_idempotency_key_1)s::VARCHAR AS anon_8, %(sa_jobs_unique_key_1)s::VARCHAR AS anon_9
FROM (SELECT invoices.id AS id, invoices.due AS due
FROM invoices) AS sa_jobs_source
WHERE true

-- every option
INSERT INTO sa_jobs (queue, handler, payload, priority, tenant, run_at, max_attempts, idempotency_key, unique_key) SELECT coalesce(sa_jobs_source.sa_jobs_queue, %(sa_jobs_queue_1)s::VARCHAR) AS coalesce_1, %(sa_jobs_handler_1)s::VARCHAR AS anon_1, jsonb_build_object(%(sa_jobs_key_1)s::VARCHAR, sa_jobs_source.id) AS anon_2, coalesce(sa_jobs_source.sa_jobs_priority, %(sa_jobs_priority_1)s::SMALLINT) AS coalesce_2, coalesce(sa_jobs_source.sa_jobs_tenant, %(sa_jobs_tenant_1)s::VARCHAR) AS coalesce_3, coalesce(coalesce(sa_jobs_source.sa_jobs_run_at, %(sa_jobs_run_at_1)s::TIMESTAMP WITH TIME ZONE), now() + make_interval(0, 0, 0, 0, 0, 0, %(sa_jobs_delay_1)s)) AS anon_3, %(sa_jobs_max_attempts_1)s::BIGINT AS anon_4, coalesce(sa_jobs_source.sa_jobs_idempotency_key, %(sa_jobs_idempotency_key_1)s::VARCHAR) AS coalesce_4, coalesce(sa_jobs_source.sa_jobs_unique_key, %(sa_jobs_unique_key_1)s::VARCHAR) AS coalesce_5
FROM (SELECT invoices.id AS id, invoices.customer AS sa_jobs_queue, invoices.customer AS sa_jobs_priority, invoices.customer AS sa_jobs_run_at, invoices.customer AS sa_jobs_tenant, invoices.customer AS sa_jobs_idempotency_key, invoices.customer AS sa_jobs_unique_key
FROM invoices) AS sa_jobs_source
WHERE true ON CONFLICT DO NOTHING

-- with meta
INSERT INTO sa_jobs (queue, handler, payload, priority, tenant, run_at, max_attempts, idempotency_key, unique_key, meta) SELECT %(sa_jobs_queue_1)s::VARCHAR AS anon_1, %(sa_jobs_handler_1)s::VARCHAR AS anon_2, jsonb_build_object(%(sa_jobs_key_1)s::VARCHAR, sa_jobs_source.id) AS anon_3, %(sa_jobs_priority_1)s::SMALLINT AS anon_4, %(sa_jobs_tenant_1)s::VARCHAR AS anon_5, coalesce(%(sa_jobs_run_at_1)s::TIMESTAMP WITH TIME ZONE, now() + make_interval(0, 0, 0, 0, 0, 0, %(sa_jobs_delay_1)s)) AS anon_6, %(sa_jobs_max_attempts_1)s::BIGINT AS anon_7, %(sa_jobs_idempotency_key_1)s::VARCHAR AS anon_8, %(sa_jobs_unique_key_1)s::VARCHAR AS anon_9, CAST(%(sa_jobs_meta_1)s::VARCHAR AS JSONB) AS anon_10
FROM (SELECT invoices.id AS id
FROM invoices) AS sa_jobs_source
WHERE true
