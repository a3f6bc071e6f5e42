SELECT sa_jobs.id, sa_jobs.status, sa_jobs.queue, sa_jobs.handler, sa_jobs.idempotency_key, sa_jobs.unique_key
FROM sa_jobs
WHERE sa_jobs.idempotency_key IN (__[POSTCOMPILE_idempotency_keys]) OR sa_jobs.unique_key IN (__[POSTCOMPILE_unique_keys]) AND sa_jobs.status IN ('ready', 'running')
