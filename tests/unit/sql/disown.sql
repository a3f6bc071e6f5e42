WITH unknown AS
(SELECT sa_jobs.id AS id
FROM sa_jobs
WHERE sa_jobs.status = 'running' AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.id != ALL (CAST(%(ids)s::VARCHAR AS BIGINT[])) ORDER BY sa_jobs.id FOR NO KEY UPDATE SKIP LOCKED)
 UPDATE sa_jobs SET status=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' ELSE 'ready' END, run_at=sa_jobs.run_at, attempts=(sa_jobs.attempts - %(attempts_1)s::BIGINT), leased_until=NULL, updated_at=now(), finished_at=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN now() ELSE NULL END WHERE sa_jobs.id = ANY (array((SELECT unknown.id
FROM unknown))) RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.status
