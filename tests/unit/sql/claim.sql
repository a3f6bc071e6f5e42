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
WHERE lane.priority IS NOT NULL),
candidate AS
(SELECT due.id AS id
FROM lane JOIN LATERAL (SELECT sa_jobs.id AS id
FROM sa_jobs
WHERE sa_jobs.queue = lane.queue AND sa_jobs.priority = lane.priority AND sa_jobs.status = 'ready' AND sa_jobs.run_at <= now() AND sa_jobs.handler = ANY (CAST(%(handlers)s::TEXT[] AS TEXT[])) ORDER BY sa_jobs.run_at, sa_jobs.id
 LIMIT %(limit)s::BIGINT FOR NO KEY UPDATE SKIP LOCKED) AS due ON true
 LIMIT %(limit)s::BIGINT)
 UPDATE sa_jobs SET status='running', attempts=(sa_jobs.attempts + %(attempts_1)s::BIGINT), claim_no=(sa_jobs.claim_no + %(claim_no_1)s::BIGINT), locked_by=%(worker)s::VARCHAR, claimed_at=now(), leased_until=(now() + make_interval(0, 0, 0, 0, 0, 0, %(lease)s)), updated_at=now() WHERE sa_jobs.id = ANY (array((SELECT candidate.id
FROM candidate))) RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.handler, CAST(sa_jobs.payload AS TEXT) AS payload, sa_jobs.priority, sa_jobs.tenant, CASE WHEN (sa_jobs.run_at < timestamptz '0001-01-02 00:00:00+00') THEN timestamptz '0001-01-02 00:00:00+00' WHEN (sa_jobs.run_at > timestamptz '9999-12-30 23:59:59.999999+00') THEN timestamptz '9999-12-30 23:59:59.999999+00' ELSE sa_jobs.run_at END AS run_at, CASE WHEN (sa_jobs.scheduled_for < timestamptz '0001-01-02 00:00:00+00') THEN timestamptz '0001-01-02 00:00:00+00' WHEN (sa_jobs.scheduled_for > timestamptz '9999-12-30 23:59:59.999999+00') THEN timestamptz '9999-12-30 23:59:59.999999+00' ELSE sa_jobs.scheduled_for END AS scheduled_for, sa_jobs.attempts, sa_jobs.max_attempts, sa_jobs.claim_no, sa_jobs.idempotency_key, sa_jobs.unique_key, CAST(sa_jobs.meta AS TEXT) AS meta, CASE WHEN (sa_jobs.created_at < timestamptz '0001-01-02 00:00:00+00') THEN timestamptz '0001-01-02 00:00:00+00' WHEN (sa_jobs.created_at > timestamptz '9999-12-30 23:59:59.999999+00') THEN timestamptz '9999-12-30 23:59:59.999999+00' ELSE sa_jobs.created_at END AS created_at, sa_jobs.claimed_at

-- from places
WITH candidate AS
(SELECT due.id AS id
FROM unnest(CAST(%(queues)s::TEXT[] AS TEXT[]), CAST(%(priorities)s::VARCHAR AS BIGINT[]), CAST(%(aboves)s::VARCHAR AS BIGINT[]), CAST(%(since_at)s::TIMESTAMP WITH TIME ZONE[] AS TIMESTAMP WITH TIME ZONE[]), CAST(%(since_id)s::VARCHAR AS BIGINT[])) AS given(queues, priorities, aboves, since_at, since_id) JOIN unnest(ARRAY[CAST((SELECT sa_jobs.priority
FROM sa_jobs
WHERE sa_jobs.queue = given.queues AND sa_jobs.status = 'ready' AND sa_jobs.priority > coalesce(given.priorities, -32769) AND sa_jobs.priority < coalesce(given.aboves, 32768) ORDER BY sa_jobs.priority DESC
 LIMIT 1) AS BIGINT), given.priorities], ARRAY[timestamptz '-infinity', coalesce(given.since_at, timestamptz '-infinity')], ARRAY[0::bigint, given.since_id]) AS lane(priority, since_at, since_id) ON true JOIN LATERAL (SELECT sa_jobs.id AS id
FROM sa_jobs
WHERE sa_jobs.queue = given.queues AND sa_jobs.priority = lane.priority AND sa_jobs.status = 'ready' AND sa_jobs.run_at <= now() AND sa_jobs.handler = ANY (CAST(%(handlers)s::TEXT[] AS TEXT[])) AND (sa_jobs.run_at, sa_jobs.id) > (lane.since_at, lane.since_id) ORDER BY sa_jobs.run_at, sa_jobs.id
 LIMIT %(limit)s::BIGINT FOR NO KEY UPDATE SKIP LOCKED) AS due ON true
 LIMIT %(limit)s::BIGINT)
 UPDATE sa_jobs SET status='running', attempts=(sa_jobs.attempts + %(attempts_1)s::BIGINT), claim_no=(sa_jobs.claim_no + %(claim_no_1)s::BIGINT), locked_by=%(worker)s::VARCHAR, claimed_at=now(), leased_until=(now() + make_interval(0, 0, 0, 0, 0, 0, %(lease)s)), updated_at=now() WHERE sa_jobs.id = ANY (array((SELECT candidate.id
FROM candidate))) RETURNING sa_jobs.id, sa_jobs.queue, sa_jobs.handler, CAST(sa_jobs.payload AS TEXT) AS payload, sa_jobs.priority, sa_jobs.tenant, CASE WHEN (sa_jobs.run_at < timestamptz '0001-01-02 00:00:00+00') THEN timestamptz '0001-01-02 00:00:00+00' WHEN (sa_jobs.run_at > timestamptz '9999-12-30 23:59:59.999999+00') THEN timestamptz '9999-12-30 23:59:59.999999+00' ELSE sa_jobs.run_at END AS run_at, CASE WHEN (sa_jobs.scheduled_for < timestamptz '0001-01-02 00:00:00+00') THEN timestamptz '0001-01-02 00:00:00+00' WHEN (sa_jobs.scheduled_for > timestamptz '9999-12-30 23:59:59.999999+00') THEN timestamptz '9999-12-30 23:59:59.999999+00' ELSE sa_jobs.scheduled_for END AS scheduled_for, sa_jobs.attempts, sa_jobs.max_attempts, sa_jobs.claim_no, sa_jobs.idempotency_key, sa_jobs.unique_key, CAST(sa_jobs.meta AS TEXT) AS meta, CASE WHEN (sa_jobs.created_at < timestamptz '0001-01-02 00:00:00+00') THEN timestamptz '0001-01-02 00:00:00+00' WHEN (sa_jobs.created_at > timestamptz '9999-12-30 23:59:59.999999+00') THEN timestamptz '9999-12-30 23:59:59.999999+00' ELSE sa_jobs.created_at END AS created_at, sa_jobs.claimed_at
