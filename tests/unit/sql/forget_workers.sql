DELETE FROM sa_jobs_workers WHERE sa_jobs_workers.id = %(id)s::VARCHAR OR sa_jobs_workers.alive_until < now() - make_interval(0, 0, 0, 0, 0, 0, %(seconds)s)
