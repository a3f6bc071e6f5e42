SELECT pg_notify(concat(%(concat_1)s::VARCHAR, left(encode(sha256(convert_to((SELECT (pg_catalog.pg_namespace.nspname || %(nspname_1)s::VARCHAR) || pg_catalog.pg_class.relname AS anon_1
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_catalog.pg_namespace.oid = pg_catalog.pg_class.relnamespace
WHERE pg_catalog.pg_class.oid = CAST('sa_jobs' AS REGCLASS)), %(convert_to_1)s::VARCHAR)), %(encode_1)s::VARCHAR), %(left_1)s::INTEGER)), left(encode(sha256(convert_to(gated.queue, %(convert_to_2)s::VARCHAR)), %(encode_2)s::VARCHAR), %(left_2)s::INTEGER)) AS pg_notify_1
FROM (SELECT given.queues AS queue, hashtextextended(given.queues, hashtextextended((SELECT (pg_catalog.pg_namespace.nspname || %(nspname_2)s::VARCHAR) || pg_catalog.pg_class.relname AS anon_2
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_catalog.pg_namespace.oid = pg_catalog.pg_class.relnamespace
WHERE pg_catalog.pg_class.oid = CAST('sa_jobs' AS REGCLASS)), 0)) AS gate
FROM unnest(CAST(%(queues)s::TEXT[] AS TEXT[])) AS given(queues)) AS gated
WHERE coalesce(current_setting(%(current_setting_1)s::VARCHAR, %(current_setting_2)s), %(coalesce_1)s::VARCHAR) != %(coalesce_2)s::VARCHAR AND CASE WHEN pg_try_advisory_lock_shared(gated.gate) THEN NOT pg_advisory_unlock_shared(gated.gate) ELSE true END
