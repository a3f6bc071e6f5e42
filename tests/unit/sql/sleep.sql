INSERT INTO sa_jobs_sleepers (queue, asleep_until) SELECT given.queues, now() + make_interval(0, 0, 0, 0, 0, 0, %(seconds)s) AS anon_1
FROM unnest(CAST(%(queues)s::TEXT[] AS TEXT[])) AS given(queues) ORDER BY given.queues ON CONFLICT (queue) DO UPDATE SET asleep_until = excluded.asleep_until WHERE sa_jobs_sleepers.asleep_until < now() + make_interval(0, 0, 0, 0, 0, 0, %(enough)s)
