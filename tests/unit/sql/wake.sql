SELECT pg_notify(concat(%(concat_1)s::VARCHAR, left(encode(sha256(convert_to((SELECT (pg_catalog.pg_namespace.nspname || %(nspname_1)s::VARCHAR) || pg_catalog.pg_class.relname AS anon_1
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_catalog.pg_namespace.oid = pg_catalog.pg_class.relnamespace
WHERE pg_catalog.pg_class.oid = CAST('sa_jobs' AS REGCLASS)), %(convert_to_1)s::VARCHAR)), %(encode_1)s::VARCHAR), %(left_1)s::INTEGER)), left(encode(sha256(convert_to(sa_jobs_sleepers.queue, %(convert_to_2)s::VARCHAR)), %(encode_2)s::VARCHAR), %(left_2)s::INTEGER)) AS pg_notify_1
FROM sa_jobs_sleepers
WHERE sa_jobs_sleepers.queue = ANY (CAST(%(queues)s::TEXT[] AS TEXT[])) AND sa_jobs_sleepers.asleep_until > clock_timestamp() AND coalesce(current_setting(%(current_setting_1)s::VARCHAR, %(current_setting_2)s), %(coalesce_1)s::VARCHAR) != %(coalesce_2)s::VARCHAR
