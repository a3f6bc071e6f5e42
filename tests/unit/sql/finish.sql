WITH mine AS
(SELECT sa_jobs.id AS id
FROM sa_jobs JOIN unnest(CAST(%(ids)s::BIGINT[] AS BIGINT[]), CAST(%(claim_nos)s::BIGINT[] AS BIGINT[]), CAST(%(results)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, results) ON sa_jobs.id = given.ids
WHERE sa_jobs.id = ANY (CAST(%(ids)s::BIGINT[] AS BIGINT[])) AND sa_jobs.id = given.ids AND sa_jobs.claim_no = given.claim_nos AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE OF sa_jobs SKIP LOCKED)
 UPDATE sa_jobs SET status='done', leased_until=NULL, result=CAST(given.results AS JSONB), updated_at=now(), finished_at=now() FROM unnest(CAST(%(ids)s::BIGINT[] AS BIGINT[]), CAST(%(claim_nos)s::BIGINT[] AS BIGINT[]), CAST(%(results)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, results) WHERE sa_jobs.id = ANY (array((SELECT mine.id
FROM mine))) AND sa_jobs.id = given.ids AND sa_jobs.claim_no = given.claim_nos RETURNING sa_jobs.id
