UPDATE sa_jobs SET status='ready', run_at=coalesce(%(run_at)s::TIMESTAMP WITH TIME ZONE, now() + make_interval(0, 0, 0, 0, 0, 0, %(delay)s)), attempts=%(attempts)s::BIGINT, cancel_requested_at=NULL, last_error=NULL, updated_at=now(), finished_at=NULL WHERE sa_jobs.id = %(job_id)s::BIGINT AND sa_jobs.status IN ('dead', 'cancelled') AND NOT (EXISTS (SELECT *
FROM sa_jobs AS twin
WHERE twin.unique_key = sa_jobs.unique_key AND twin.status IN ('ready', 'running'))) RETURNING sa_jobs.id, sa_jobs.queue
