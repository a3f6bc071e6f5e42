SELECT sa_jobs.id, sa_jobs.claim_no, sa_jobs.locked_by, sa_jobs.leased_until IS NOT NULL AS leased, sa_jobs.status
FROM sa_jobs
WHERE sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[]))
