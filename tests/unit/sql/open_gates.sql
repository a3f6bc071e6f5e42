SELECT gated.queue, CASE WHEN pg_try_advisory_lock(gated.gate) THEN %(param_1)s::VARCHAR WHEN (pg_try_advisory_lock_shared(gated.gate) AND pg_advisory_unlock_shared(gated.gate)) THEN %(param_2)s::VARCHAR ELSE %(param_3)s::VARCHAR END AS holder
FROM (SELECT given.queues AS queue, hashtextextended(given.queues, hashtextextended((SELECT (pg_catalog.pg_namespace.nspname || %(nspname_1)s::VARCHAR) || pg_catalog.pg_class.relname AS anon_1
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_catalog.pg_namespace.oid = pg_catalog.pg_class.relnamespace
WHERE pg_catalog.pg_class.oid = CAST('sa_jobs' AS REGCLASS)), 0)) AS gate
FROM unnest(CAST(%(queues)s::TEXT[] AS TEXT[])) AS given(queues)) AS gated
