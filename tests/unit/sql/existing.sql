SELECT sa_jobs.id, sa_jobs.status, sa_jobs.queue, sa_jobs.handler, sa_jobs.idempotency_key, sa_jobs.unique_key
FROM sa_jobs
WHERE sa_jobs.idempotency_key = ANY (CAST(array((SELECT jsonb_array_elements_text(CAST(%(idempotency_keys)s::VARCHAR AS JSONB)) AS element)) AS TEXT[])) OR sa_jobs.unique_key = ANY (CAST(array((SELECT jsonb_array_elements_text(CAST(%(unique_keys)s::VARCHAR AS JSONB)) AS element)) AS TEXT[])) AND sa_jobs.status IN ('ready', 'running')
