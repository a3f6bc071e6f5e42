WITH RECURSIVE lane(queue, priority) AS
(SELECT served.queues AS queue, (SELECT sa_jobs.priority
FROM sa_jobs
WHERE sa_jobs.queue = served.queues AND sa_jobs.status = 'ready' ORDER BY sa_jobs.priority DESC
 LIMIT 1) AS priority
FROM unnest(CAST(%(queues)s::TEXT[] AS TEXT[])) AS served(queues) UNION ALL SELECT lane.queue AS queue, (SELECT sa_jobs.priority
FROM sa_jobs
WHERE sa_jobs.queue = lane.queue AND sa_jobs.status = 'ready' AND sa_jobs.priority < lane.priority ORDER BY sa_jobs.priority DESC
 LIMIT 1) AS anon_1
FROM lane
WHERE lane.priority IS NOT NULL)
 SELECT lane.queue, lane.priority, now() AS now
FROM lane
WHERE lane.priority IS NOT NULL
