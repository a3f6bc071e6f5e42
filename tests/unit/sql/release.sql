WITH mine AS
(SELECT sa_jobs.id AS id
FROM sa_jobs JOIN unnest(CAST(%(ids)s::BIGINT[] AS BIGINT[]), CAST(%(claim_nos)s::BIGINT[] AS BIGINT[])) AS given(ids, claim_nos) ON sa_jobs.id = given.ids
WHERE sa_jobs.id = ANY (CAST(%(ids)s::BIGINT[] AS BIGINT[])) AND sa_jobs.id = given.ids AND sa_jobs.claim_no = given.claim_nos AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE OF sa_jobs SKIP LOCKED)
 UPDATE sa_jobs SET status=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN 'cancelled' ELSE 'ready' END, run_at=sa_jobs.run_at, attempts=(sa_jobs.attempts - %(attempts_1)s::BIGINT), leased_until=NULL, updated_at=now(), finished_at=CASE WHEN (sa_jobs.cancel_requested_at IS NOT NULL) THEN now() ELSE NULL END FROM unnest(CAST(%(ids)s::BIGINT[] AS BIGINT[]), CAST(%(claim_nos)s::BIGINT[] AS BIGINT[])) AS given(ids, claim_nos) WHERE sa_jobs.id = ANY (array((SELECT mine.id
FROM mine))) AND sa_jobs.id = given.ids AND sa_jobs.claim_no = given.claim_nos RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.status
