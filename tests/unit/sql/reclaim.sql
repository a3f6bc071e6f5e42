WITH lapsed AS
(SELECT sa_jobs.id AS id, sa_jobs.locked_by AS locked_by
FROM sa_jobs
WHERE sa_jobs.status = 'running' AND sa_jobs.leased_until < now() AND NOT (sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.id = ANY (CAST(%(held)s::VARCHAR AS BIGINT[]))) ORDER BY sa_jobs.id
 LIMIT %(limit)s::BIGINT FOR NO KEY UPDATE SKIP LOCKED),
taken AS
(UPDATE sa_jobs SET status=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN (sa_jobs.attempts >= sa_jobs.max_attempts) THEN 'dead' ELSE 'ready' END, run_at=CASE WHEN starts_with(coalesce(sa_jobs.last_error, %(coalesce_1)s::VARCHAR), %(starts_with_1)s::VARCHAR) THEN now() + make_interval(0, 0, 0, 0, 0, 0, random() * least(300.0, 2.0 * power(%(power_1)s, least(greatest(sa_jobs.attempts - %(attempts_1)s::BIGINT, %(greatest_1)s::INTEGER), %(least_1)s::INTEGER)))) ELSE sa_jobs.run_at END, locked_by=NULL, leased_until=NULL, last_error=CASE WHEN (sa_jobs.attempts >= sa_jobs.max_attempts) THEN %(param_1)s::VARCHAR ELSE %(param_2)s::VARCHAR END, updated_at=now(), finished_at=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL OR sa_jobs.attempts >= sa_jobs.max_attempts) THEN now() ELSE NULL END FROM lapsed WHERE sa_jobs.id = ANY (array((SELECT lapsed.id
FROM lapsed))) AND sa_jobs.id = lapsed.id RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.handler, sa_jobs.attempts, sa_jobs.claim_no, sa_jobs.claimed_at, sa_jobs.last_error, sa_jobs.status, lapsed.locked_by AS worker),
history AS
(INSERT INTO sa_jobs_failures (job_id, queue, handler, attempt, claim_no, worker, error, claimed_at, failed_at) SELECT taken.id AS id, taken.queue AS queue, taken.handler AS handler, taken.attempts AS attempts, taken.claim_no AS claim_no, taken.worker AS worker, taken.last_error AS last_error, taken.claimed_at AS claimed_at, now() AS now_1
FROM taken)
 SELECT taken.id, taken.queue, taken.handler, taken.attempts AS attempt, taken.worker, taken.status
FROM taken
