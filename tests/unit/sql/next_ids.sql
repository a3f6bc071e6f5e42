SELECT CAST(json_agg(CASE WHEN (SELECT has_sequence_privilege(CAST(pg_get_serial_sequence('sa_jobs', 'id') AS REGCLASS), 'USAGE, UPDATE') AS has_sequence_privilege_1) THEN nextval((SELECT CAST(pg_get_serial_sequence('sa_jobs', 'id') AS REGCLASS) AS pg_get_serial_sequence_1)) END) AS TEXT) AS json_agg_1
FROM generate_series(1, %(count)s::BIGINT)
