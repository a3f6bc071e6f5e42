WITH mine AS
(SELECT sa_jobs.id AS id
FROM sa_jobs JOIN unnest(CAST(%(ids)s::BIGINT[] AS BIGINT[]), CAST(%(claim_nos)s::BIGINT[] AS BIGINT[]), CAST(%(final)s::BOOLEAN[] AS BOOLEAN[]), CAST(%(delays)s::DOUBLE PRECISION[] AS DOUBLE PRECISION[]), CAST(%(errors)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, final, delays, errors) ON sa_jobs.id = given.ids
WHERE sa_jobs.id = ANY (CAST(%(ids)s::BIGINT[] AS BIGINT[])) AND sa_jobs.id = given.ids AND sa_jobs.claim_no = given.claim_nos AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE OF sa_jobs SKIP LOCKED),
failed AS
(UPDATE sa_jobs SET status=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN given.final THEN 'dead' ELSE 'ready' END, run_at=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL OR given.final) THEN sa_jobs.run_at ELSE now() + make_interval(0, 0, 0, 0, 0, 0, given.delays) END, leased_until=NULL, last_error=given.errors, updated_at=now(), finished_at=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL OR given.final) THEN now() ELSE NULL END FROM unnest(CAST(%(ids)s::BIGINT[] AS BIGINT[]), CAST(%(claim_nos)s::BIGINT[] AS BIGINT[]), CAST(%(final)s::BOOLEAN[] AS BOOLEAN[]), CAST(%(delays)s::DOUBLE PRECISION[] AS DOUBLE PRECISION[]), CAST(%(errors)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, final, delays, errors) WHERE sa_jobs.id = ANY (array((SELECT mine.id
FROM mine))) AND sa_jobs.id = given.ids AND sa_jobs.claim_no = given.claim_nos RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.handler, sa_jobs.attempts, sa_jobs.claim_no, sa_jobs.claimed_at, sa_jobs.last_error, sa_jobs.status, sa_jobs.locked_by AS worker),
history AS
(INSERT INTO sa_jobs_failures (job_id, queue, handler, attempt, claim_no, worker, error, claimed_at, failed_at) SELECT failed.id AS id, failed.queue AS queue, failed.handler AS handler, failed.attempts AS attempts, failed.claim_no AS claim_no, failed.worker AS worker, failed.last_error AS last_error, failed.claimed_at AS claimed_at, now() AS now_1
FROM failed)
 SELECT failed.id, failed.status
FROM failed
