"""The statements; every row is a function of its number, the total and the moment.

Parameters: jobs, dead (letters), now, service; first and last of a chunk.
"""

from __future__ import annotations

KINDS = """
CREATE TEMPORARY TABLE seed_kind (slot int PRIMARY KEY, queue text, handler text, keys int, run int)
"""
ERRORS = """
CREATE TEMPORARY TABLE seed_error (
    handler text, slot int, error_type text, error text, fingerprint text, reason text,
    traceback text, PRIMARY KEY (handler, slot)
)
"""
WORKERS = "CREATE TEMPORARY TABLE seed_worker (slot int PRIMARY KEY, id uuid, name text)"

NUMBERED = """
SELECT n, seed_kind.*, h, run_ms, created_at,
    (lpad(to_hex((extract(epoch FROM created_at) * 1000)::bigint), 12, '0')
        || '7' || lpad(to_hex(n & 4095), 3, '0') || 'a'
        || lpad(to_hex(hashint8extended(n, 2) & 1152921504606846975), 15, '0'))::uuid AS id,
    n * %(dead)s / %(jobs)s > (n - 1) * %(dead)s / %(jobs)s AS is_dead,
    n * %(dead)s / %(jobs)s AS death,
    n > %(jobs)s - %(jobs)s / 500 AS is_recent
FROM (
    SELECT n, h, h %% 100 AS slot, 0.2 + 0.8 * ((h / 100) %% 1000) / 1000.0 AS run_ms,
        %(now)s::timestamptz - interval '7 days'
            * (1 - n::float8 / %(jobs)s - 0.6 * sin(14 * pi() * n / %(jobs)s) / (14 * pi()))
            AS created_at
    FROM (
        SELECT n, (hashint8extended(n, 1) & 1073741823)::int AS h FROM ({numbers}) AS v (n)
    ) AS hashed
) AS timed JOIN seed_kind USING (slot)
"""
_CHUNK = "SELECT generate_series(%(first)s::bigint, %(last)s::bigint)"
_DEATHS = """
SELECT (d * %(jobs)s + %(dead)s - 1) / %(dead)s FROM generate_series(1, %(dead)s::bigint) AS d
"""

JOBS = f"""
CREATE TEMPORARY TABLE seed_job AS
WITH numbered AS ({NUMBERED.format(numbers=_CHUNK)}), stated AS (
    SELECT *, CASE
        WHEN is_dead AND death %% 10 IN (7, 8) THEN 'completed'
        WHEN is_dead THEN 'failed'
        WHEN is_recent AND h %% 10 < 4 THEN 'pending'
        WHEN is_recent AND h %% 10 < 6 THEN 'failing'
        WHEN is_recent AND h %% 10 < 7 THEN 'queued'
        WHEN h %% 500 = 7 THEN 'cancelled'
        ELSE 'completed' END AS state,
        CASE WHEN is_dead THEN 3 WHEN (h / 7) %% 50 = 0 THEN 2 ELSE 1 END AS tried
    FROM numbered
), timed AS (
    SELECT *, created_at + interval '5 ms' * (1 + (h / 3) %% 10) AS begun,
        run_ms * power(2, run) * interval '1 ms' AS took
    FROM stated
)
SELECT n, timed.id, timed.queue, timed.handler,
    CASE WHEN h %% 10 < 3 THEN 'order-' || n END AS unique_id,
    CASE WHEN keys > 0 THEN 'C' || (h / 11) %% keys ELSE '' END AS key,
    state,
    CASE WHEN is_dead AND state = 'completed' THEN 2 ELSE 1 END AS generation,
    CASE WHEN state IN ('completed', 'failed') THEN tried WHEN state = 'failing' THEN 1 ELSE 0 END
        AS attempts,
    3 AS max_attempts,
    convert_to(format('{{"order_id": %%s, "customer_id": "C%%s"}}', n,
        (h / 11) %% greatest(keys, 1)), 'UTF8') AS payload,
    'application/json' AS content_type, NULL::jsonb AS headers,
    -- What has not run yet is due later, or its message is with the broker since a moment.
    CASE WHEN state IN ('pending', 'failing')
        THEN %(now)s + interval '1 second' * (h %% 86400 + 3600)
        ELSE created_at END AS available_at,
    NULL::timestamptz AS expires_at, created_at,
    CASE state WHEN 'pending' THEN NULL WHEN 'queued' THEN %(now)s
        ELSE created_at + interval '4 ms' END AS queued_at,
    CASE WHEN state IN ('completed', 'failed', 'failing') THEN begun END AS started_at,
    CASE WHEN state IN ('completed', 'failed') THEN begun + took
        WHEN state = 'cancelled' THEN begun END AS finished_at,
    '' AS lease_token, NULL::timestamptz AS lease_expires_at,
    CASE WHEN state = 'completed' AND h %% 4 = 0
        THEN convert_to(format('{{"value": %%s}}', h), 'UTF8') END AS result,
    3600000 AS result_ttl,
    CASE WHEN state IN ('completed', 'failed') THEN begun + took + interval '1 hour' END
        AS result_expires_at,
    CASE WHEN state IN ('failed', 'failing') THEN seed_error.error ELSE '' END AS error,
    '' AS destination, 'shop-' || timed.queue AS topic, h %% 4 AS partition, n / 4 AS "offset"
FROM timed LEFT JOIN seed_error ON state IN ('failed', 'failing')
    AND seed_error.handler = timed.handler AND seed_error.slot = (h / 13) %% 20
"""
ADDED = """
INSERT INTO kjo_job (id, queue, handler, unique_id, key, state, generation, attempts, max_attempts,
    payload, content_type, headers, available_at, expires_at, created_at, queued_at, started_at,
    finished_at, lease_token, lease_expires_at, result, result_ttl, result_expires_at, error,
    destination, topic, partition, "offset")
SELECT id, queue, handler, unique_id, key, 'pending', 1, 0, max_attempts, payload,
    content_type, headers, available_at, expires_at, created_at, NULL, NULL, NULL,
    '', NULL, NULL, result_ttl, NULL, '', destination, '', NULL, NULL
FROM seed_job WHERE n BETWEEN %(first)s AND %(last)s
"""
ENDED = """
UPDATE kjo_job AS job SET state = seed_job.state, generation = seed_job.generation,
    attempts = seed_job.attempts, queued_at = seed_job.queued_at, started_at = seed_job.started_at,
    finished_at = seed_job.finished_at, result = seed_job.result,
    result_expires_at = seed_job.result_expires_at, error = seed_job.error, topic = seed_job.topic,
    partition = seed_job.partition, "offset" = seed_job."offset"
FROM seed_job WHERE n BETWEEN %(first)s AND %(last)s AND job.id = seed_job.id
    AND seed_job.state <> 'pending'
"""
MARKERS = """
INSERT INTO processed_events
    (id, event_id, event_type, service_name, processed_at, event_data, created_at, updated_at)
SELECT id, id || CASE generation WHEN 1 THEN '' ELSE ':' || generation END, handler, %(service)s,
    finished_at, NULL, finished_at, finished_at
FROM seed_job WHERE state = 'completed'
"""

_TRIED = """
SELECT job.*, attempt, (hashint8extended("offset", 5) & 1073741823)::int AS h
FROM kjo_job AS job, generate_series(1, 3) AS attempt
WHERE (job.attempts > 1 OR state IN ('failed', 'failing'))
    AND attempt <= CASE WHEN state = 'completed' AND generation = 1 THEN attempts - 1
        ELSE attempts END
"""
FAILURES = f"""
WITH tried AS ({_TRIED})
INSERT INTO kjo_job_failure (id, job_id, generation, attempt, worker, error_type, error, traceback,
    started_at, failed_at, retry_at)
SELECT (left(tried.id::text, 19) || '9' || attempt || substr(tried.id::text, 22))::uuid, tried.id,
    1, attempt, seed_worker.name, error_type, seed_error.error, traceback, started_at,
    started_at + interval '1 ms',
    CASE WHEN attempt < 3 THEN started_at + interval '1 second' * power(2, attempt) END
FROM tried JOIN seed_worker ON seed_worker.slot = h %% 4
    JOIN seed_error ON seed_error.handler = tried.handler AND seed_error.slot = (h / 13) %% 20
"""

LETTERS = f"""
WITH numbered AS ({NUMBERED.format(numbers=_DEATHS)}), closed AS (
    SELECT *, CASE WHEN death %% 10 IN (7, 8) THEN 'replayed' WHEN death %% 10 = 9 THEN 'discarded'
        ELSE 'open' END AS letter_state
    FROM numbered
)
INSERT INTO kjo_dead_letter (id, state, reason, source_id, job_id, message_id, queue, handler, key,
    value, headers, content_type, consumer_group, topic, partition, "offset", error_type, error,
    traceback, fingerprint, release, attempts, replay_count, failed_at, closed_at, note)
SELECT job.id, letter_state, reason, md5(job.id::text) || md5(job.handler), job.id, job.id::text,
    job.queue, job.handler, convert_to(job.key, 'UTF8'), job.payload, '{{}}', job.content_type,
    job.queue || '-group', job.topic, job.partition, job."offset", error_type, seed_error.error,
    traceback, fingerprint,
    '2024.' || 1 + (extract(epoch FROM %(now)s - job.created_at) / 201600)::int %% 3,
    3, CASE letter_state WHEN 'replayed' THEN 1 ELSE 0 END, job.finished_at,
    CASE WHEN letter_state <> 'open' THEN job.finished_at + interval '1 hour' END, ''
FROM closed JOIN kjo_job AS job ON job.id = closed.id
    JOIN seed_error ON seed_error.handler = job.handler AND seed_error.slot = (h / 13) %% 20
"""

_HISTOGRAM = """
('[' || repeat('0,', {power} - 1) || ran / 4 || ',' || ran - 2 * (ran / 4) || ',' || ran / 4
    || repeat(',0', 22 - {power}) || ']')::jsonb
"""
BUCKETS = f"""
INSERT INTO kjo_metric_bucket (id, minute, queue, handler, worker_id, completed_count,
    retried_count, failed_count, duplicate_count, skipped_count, lag, run_histogram, wait_histogram,
    run_seconds_sum, wait_seconds_sum)
SELECT md5(minute::text || counted.handler || worker)::uuid, minute, counted.queue,
    counted.handler, seed_worker.id, completed, retried, failed, 0, 0, NULL,
    {_HISTOGRAM.format(power="run")}, {_HISTOGRAM.format(power="6")},
    run_seconds, ran * 0.05
FROM (
    SELECT date_trunc('minute', started_at) AS minute, queue, handler,
        ("offset" %% 4)::int AS worker,
        count(*) FILTER (WHERE state = 'completed') AS completed,
        count(*) FILTER (WHERE state = 'failed') AS failed,
        sum(attempts) - count(*) FILTER (WHERE state <> 'failing') AS retried,
        sum(attempts) AS ran,
        coalesce(sum(extract(epoch FROM finished_at - started_at)), 0) AS run_seconds
    FROM kjo_job WHERE started_at IS NOT NULL GROUP BY 1, 2, 3, 4
) AS counted
    JOIN seed_worker ON seed_worker.slot = worker
    JOIN (SELECT DISTINCT handler, run FROM seed_kind) AS kind ON kind.handler = counted.handler
"""
LAGS = """
INSERT INTO kjo_metric_bucket (id, minute, queue, handler, worker_id, completed_count,
    retried_count, failed_count, duplicate_count, skipped_count, lag, run_histogram, wait_histogram,
    run_seconds_sum, wait_seconds_sum)
SELECT md5(minute::text || queue)::uuid, minute, queue, '', seed_worker.id, 0, 0, 0, 0, 0,
    (300 * (1 + sin(extract(epoch FROM minute) / 3600))
        + hashtext(minute::text || queue) %% 50 + 50)
        ::int,
    '[]', '[]', 0, 0
FROM (SELECT DISTINCT queue FROM seed_kind) AS kind
    CROSS JOIN generate_series(date_trunc('minute', %(now)s::timestamptz) - interval '7 days',
        date_trunc('minute', %(now)s::timestamptz), interval '1 minute') AS minute
    JOIN seed_worker ON seed_worker.slot = 0
"""
ROLLUPS = f"""
INSERT INTO kjo_metric_rollup (id, minutes, minute, queue, handler, worker_id, completed_count,
    retried_count, failed_count, duplicate_count, skipped_count, lag, run_histogram, wait_histogram,
    run_seconds_sum, wait_seconds_sum)
SELECT md5(minutes::text || begun || summed.queue || summed.handler || worker_id)::uuid, minutes,
    begun, summed.queue, summed.handler, worker_id, completed, retried, failed, 0, 0, lag,
    CASE WHEN lag IS NULL THEN {_HISTOGRAM.format(power="run")} ELSE '[]' END,
    CASE WHEN lag IS NULL THEN {_HISTOGRAM.format(power="6")} ELSE '[]' END,
    run_seconds, wait_seconds
FROM (
    SELECT minutes, date_bin(minutes * interval '1 minute', minute, 'epoch'::timestamptz) AS begun,
        queue, handler, '00000000-0000-0000-0000-000000000000'::uuid AS worker_id,
        sum(completed_count)::bigint AS completed,
        sum(retried_count)::bigint AS retried, sum(failed_count)::bigint AS failed,
        sum(completed_count + retried_count + failed_count)::bigint AS ran,
        (array_agg(lag ORDER BY minute DESC))[1] AS lag,
        sum(run_seconds_sum) AS run_seconds, sum(wait_seconds_sum) AS wait_seconds
    FROM kjo_metric_bucket CROSS JOIN (VALUES (15), (60)) AS length (minutes)
    GROUP BY 1, 2, 3, 4, 5
) AS summed
    LEFT JOIN (SELECT DISTINCT handler, run FROM seed_kind) AS kind USING (handler)
"""
WORKING = """
INSERT INTO kjo_worker (id, name, hostname, pid, queues, state, wish, release, concurrency,
    is_relaying, processed_count, failed_count, in_flight_count, partitions, rss_bytes, last_error,
    started_at, heartbeat_at)
SELECT id, name, name, 100 + slot, (SELECT jsonb_agg(DISTINCT queue) FROM seed_kind), 'running',
    '', '2024.3', 4, slot = 0, %(jobs)s / 4, %(dead)s / 4, slot, '[]', 100000000, '',
    %(now)s::timestamptz - interval '7 days', %(now)s
FROM seed_worker
"""
CONSEQUENCES = {
    "failed attempts": FAILURES,
    "dead letters": LETTERS,
    "minute buckets": BUCKETS,
    "lags": LAGS,
    "roll-ups": ROLLUPS,
    "workers": WORKING,
}
