SELECT sa_jobs.status
FROM sa_jobs
WHERE sa_jobs.id = %(job_id)s::BIGINT
