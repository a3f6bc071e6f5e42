WITH mine AS
(SELECT sa_jobs.id AS id, sa_jobs.claim_no AS claim_no
FROM sa_jobs
WHERE sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[])) AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE SKIP LOCKED)
 UPDATE sa_jobs SET status='done', leased_until=NULL, result=NULL, updated_at=now(), finished_at=now() WHERE sa_jobs.id = ANY (array((SELECT mine.id
FROM mine, unnest(CAST(%(ids)s::VARCHAR AS BIGINT[]), CAST(%(claim_nos)s::VARCHAR AS BIGINT[])) AS given(ids, claim_nos)
WHERE mine.id = given.ids AND mine.claim_no = given.claim_nos))) RETURNING sa_jobs.id

-- results
WITH mine AS
(SELECT sa_jobs.id AS id, sa_jobs.claim_no AS claim_no
FROM sa_jobs
WHERE sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[])) AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE SKIP LOCKED)
 UPDATE sa_jobs SET status='done', leased_until=NULL, result=CAST(given.results AS JSONB), updated_at=now(), finished_at=now() FROM mine, unnest(CAST(%(ids)s::VARCHAR AS BIGINT[]), CAST(%(claim_nos)s::VARCHAR AS BIGINT[]), CAST(%(results)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, results) WHERE sa_jobs.id = mine.id AND mine.id = given.ids AND mine.claim_no = given.claim_nos RETURNING sa_jobs.id

-- wait
WITH mine AS
(SELECT sa_jobs.id AS id, sa_jobs.claim_no AS claim_no
FROM sa_jobs
WHERE sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[])) AND sa_jobs.locked_by = %(worker)s::VARCHAR AND sa_jobs.leased_until IS NOT NULL ORDER BY sa_jobs.id FOR NO KEY UPDATE)
 UPDATE sa_jobs SET status='done', leased_until=NULL, result=CAST(given.results AS JSONB), updated_at=clock_timestamp(), finished_at=clock_timestamp() FROM mine, unnest(CAST(%(ids)s::VARCHAR AS BIGINT[]), CAST(%(claim_nos)s::VARCHAR AS BIGINT[]), CAST(%(results)s::TEXT[] AS TEXT[])) AS given(ids, claim_nos, results) WHERE sa_jobs.id = mine.id AND mine.id = given.ids AND mine.claim_no = given.claim_nos RETURNING sa_jobs.id
