WITH mine AS
(SELECT sa_jobs.id AS id, sa_jobs.claim_no AS claim_no
FROM sa_jobs
WHERE sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[])) AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE SKIP LOCKED),
settled AS
(UPDATE sa_jobs SET status=CASE WHEN (given.ends = 'done') THEN 'done' WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN (given.ends = 'dead') THEN 'dead' ELSE 'ready' END, run_at=CASE WHEN (CASE WHEN (given.ends = 'done') THEN 'done' WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN (given.ends = 'dead') THEN 'dead' ELSE 'ready' END = 'ready' AND given.delays IS NOT NULL) THEN now() + make_interval(0, 0, 0, 0, 0, 0, given.delays) ELSE sa_jobs.run_at END, attempts=CASE WHEN (given.ends IN ('snoozed', 'released')) THEN sa_jobs.attempts - %(attempts_1)s::BIGINT ELSE sa_jobs.attempts END, leased_until=NULL, result=CAST(given.results AS JSONB), last_error=coalesce(given.errors, sa_jobs.last_error), updated_at=now(), finished_at=CASE WHEN (CASE WHEN (given.ends = 'done') THEN 'done' WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' WHEN (given.ends = 'dead') THEN 'dead' ELSE 'ready' END = 'ready') THEN NULL ELSE now() END FROM mine, unnest(CAST(%(ids)s::VARCHAR AS BIGINT[]), CAST(%(claim_nos)s::VARCHAR AS BIGINT[]), CAST(%(ends)s::TEXT[] AS TEXT[]), CAST(%(results)s::TEXT[] AS TEXT[]), CAST(%(errors)s::TEXT[] AS TEXT[]), CAST(%(delays)s::DOUBLE PRECISION[] AS DOUBLE PRECISION[])) AS given(ids, claim_nos, ends, results, errors, delays) WHERE sa_jobs.id = mine.id AND mine.id = given.ids AND mine.claim_no = given.claim_nos RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.handler, sa_jobs.attempts, sa_jobs.claim_no, sa_jobs.claimed_at, sa_jobs.last_error, sa_jobs.status, sa_jobs.locked_by AS worker, given.errors IS NOT NULL AS failed),
history AS
(INSERT INTO sa_jobs_failures (job_id, queue, handler, attempt, claim_no, worker, error, claimed_at, failed_at) SELECT settled.id AS id, settled.queue AS queue, settled.handler AS handler, settled.attempts AS attempts, settled.claim_no AS claim_no, settled.worker AS worker, settled.last_error AS last_error, settled.claimed_at AS claimed_at, now() AS now_1
FROM settled
WHERE settled.failed)
 SELECT settled.id, settled.queue, settled.status
FROM settled
