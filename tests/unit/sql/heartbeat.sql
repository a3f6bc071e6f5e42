WITH mine AS
(SELECT sa_jobs.id AS id, sa_jobs.claim_no AS claim_no
FROM sa_jobs
WHERE sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[])) AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE SKIP LOCKED)
 UPDATE sa_jobs SET leased_until=(now() + make_interval(0, 0, 0, 0, 0, 0, %(lease)s)), meta=CASE WHEN (given.progress IS NOT NULL) THEN sa_jobs.meta || jsonb_build_object(%(jsonb_build_object_1)s::VARCHAR, CAST(given.progress AS JSONB)) ELSE sa_jobs.meta END, updated_at=now() FROM mine, unnest(CAST(%(ids)s::VARCHAR AS BIGINT[]), CAST(%(claim_nos)s::VARCHAR AS BIGINT[]), CAST(%(progress)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, progress) WHERE sa_jobs.id = mine.id AND mine.id = given.ids AND mine.claim_no = given.claim_nos RETURNING sa_jobs.id, sa_jobs.cancel_requested_at IS NOT NULL AS cancel_requested
