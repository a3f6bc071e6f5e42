SELECT pg_try_advisory_xact_lock(hashtextextended(concat(concat(%(concat_1)s::VARCHAR, left(encode(sha256(convert_to((SELECT (pg_catalog.pg_namespace.nspname || %(nspname_1)s::VARCHAR) || pg_catalog.pg_class.relname AS anon_1
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_catalog.pg_namespace.oid = pg_catalog.pg_class.relnamespace
WHERE pg_catalog.pg_class.oid = CAST('sa_jobs' AS REGCLASS)), %(convert_to_1)s::VARCHAR)), %(encode_1)s::VARCHAR), %(left_1)s::INTEGER)), %(concat_2)s::VARCHAR), %(hashtextextended_1)s::INTEGER)) AS pg_try_advisory_xact_lock_1
