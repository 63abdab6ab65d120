"""Settings: one ``KJO`` dict, read lazily, typed, validated by the system checks.

Durations are ``timedelta`` or a number of seconds; a key ending in ``_BYTES`` counts bytes. Nothing
here is mutated; overriding ``settings.KJO`` in a test takes effect at once.

What the dict leaves out is read from the environment. ``KJO_CONCURRENCY=8`` stands for
``KJO = {"CONCURRENCY": 8}``: a value is read as JSON, and as text where it is none or where the
setting is a text: ``KJO_RELEASE=1.10`` is no number. Two names of template classes configure a
server each:

    KJO_KAFKA_BROKERS   host:port,host:port   the transport "default"
    KJO_REDIS_URL       redis://host:port/0   the coordination
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.translation import gettext_noop as _

from kjo_django.refusals import RefusedError, Wording
from kjo_django.timetables import aware_moment, cron_expression, zone_name
from kjo_django.values import (
    MAX_PRIORITY,
    MOST_AT_ONCE,
    Problem,
    Rate,
    attempts,
    duration,
    flag,
    is_kept,
    lifetime,
    mapping,
    name_text,
    number,
    one_of,
    option,
    optional,
    optional_duration,
    optional_text,
    rate,
    read_options,
    refuse_unknown,
    short_text,
    text,
    texts,
    whole,
    whole_seconds,
)

DEFAULT_COORDINATION = "kjo_django.coordination.database.DatabaseCoordination"

LEVELS = {2: (50, "-urgent"), 1: (1, "-high"), 0: (0, ""), -1: (-MAX_PRIORITY, "-low")}
"""The least priority of each level, and how its topic's name ends; the most urgent one first."""
_LEVELS_OF = {1: (0,), 2: (1, 0), 3: (1, 0, -1), 4: (2, 1, 0, -1)}
"""The levels of a queue by how many it has."""


def level_of(priority: int) -> int:
    """Return the level of a priority: 2 urgent, 1 high, 0 normal, -1 low."""
    return next(level for level, (least, _) in LEVELS.items() if priority >= least)


def priority_of(level: int) -> int:
    """Return the priority that is given to what has only a level: the one nearest to 0."""
    return LEVELS[level][0] if level > 0 else level


# --- The settings ---------------------------------------------------------------------------------


EVENT_FORMATS = ("plain", "cloudevents-structured", "cloudevents-binary")
"""How ``publish_event`` writes an event."""


@dataclass(frozen=True)
class QueueOptions:
    """One entry of ``QUEUES``. An option that is None has the value of the setting of its name."""

    transport: str = option(text, "default", "Alias in TRANSPORTS.")
    database: str | None = option(
        optional_text,
        None,
        "Alias of the database of its jobs, with a separate outbox and markers; by default "
        "that of DATABASE.",
    )
    topic: str | None = option(optional_text, None, "Topic; the queue's name if not given.")
    consumer_group: str | None = option(
        optional_text, None, "Consumer group; '<SERVICE_NAME>-group' if not given."
    )
    concurrency: int | None = option(
        optional(whole(1)),
        None,
        "Groups of this queue that one worker runs at the same time; by default its lanes.",
    )
    rate: Rate | None = option(
        optional(rate),
        None,
        "How many of its jobs all workers together start per period: '5/s', '100/m'; by "
        "default no limit.",
    )
    burst: int = option(
        whole(1, MOST_AT_ONCE), 1, "Jobs that can start together after a time without starts."
    )
    key_prefix: str | None = option(
        optional_text, None, "PREFIX of its lease names; the upper-case queue name if not given."
    )
    processing_ttl: timedelta | None = option(
        optional_duration, None, "How long its leases last; PROCESSING_TTL if not given."
    )
    sent_ttl: timedelta | None = option(
        optional_duration, None, "How long its items' sent marks last; see SENT_TTL."
    )
    max_attempts: int | None = option(
        optional(attempts), None, "Executions of a job before it is dead-lettered."
    )
    timeout: timedelta | None = option(optional_duration, None, "Longest run of one attempt.")
    result_ttl: timedelta | None = option(optional(lifetime), None, "How long results are kept.")
    dead_letter_topic: str | None = option(
        optional_text, None, "Topic of its dead letters; '<topic>-dlq' if not given."
    )
    topic_options: dict[str, Any] = option(mapping, {}, "See the reference of topics.")
    priorities: int = option(
        whole(1, len(LEVELS)),
        1,
        "Number of levels of priority, each with its own topic: 2 adds '<topic>-high', 3 "
        "also '<topic>-low', 4 also '<topic>-urgent'.",
    )
    consume: bool = option(
        flag, True, "False: this service only publishes to the topic; no worker subscribes to it."
    )
    retry_queue: str | None = option(
        optional_text,
        None,
        "Queue whose topic is used for retries of messages that other services also read; by "
        "default this queue.",
    )
    event_format: str | None = option(
        optional(one_of(*EVENT_FORMATS)),
        None,
        "How publish_event writes events for the topic; EVENT_FORMAT if not given.",
    )


CATCH_UPS = ("none", "one", "all")
OVERLAPS = ("allow", "skip")


def _json_object(value: Any) -> dict[str, Any]:
    """A dict that JSON and every database can hold."""
    wanted = _("a dict of at most %(most)s levels of JSON, with text keys and 64-bit numbers")
    try:
        found = mapping(value)
        text = json.dumps(found, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise RefusedError(wanted, most=_MOST_LEVELS) from None
    # What JSON makes of another type is not what was given; PostgreSQL holds no NUL.
    if json.loads(text) != found or _NUL.search(text) or not _is_kept(found, _MOST_LEVELS):
        raise RefusedError(wanted, most=_MOST_LEVELS)
    return found


def _is_kept(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        # A float as large as that is whole, and comes back from PostgreSQL as an int.
        return not isinstance(value, int | float) or is_kept(int(value))
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_kept(each, levels - 1) for each in inner)


_MOST_LEVELS = 30
"""MariaDB keeps JSON of 32, and a declaration has the payload within a dict."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True)
class ScheduleOptions:
    """One entry of ``SCHEDULES``, and what else declares or changes a schedule. Of ``cron``,
    ``every`` and ``at`` each schedule has one. The names are those of columns of ``Schedule``."""

    job: str = option(text, "", "Name of the job that each tick enqueues.")
    payload: dict[str, Any] = option(_json_object, {}, "The arguments of the job.")
    cron: str = option(cron_expression, "", "Cron expression of five fields, or e.g. @daily.")
    every: int | None = option(
        optional(whole_seconds(1)), None, "Time between two ticks: seconds, or a timedelta."
    )
    at: datetime | None = option(optional(aware_moment), None, "Time of a single tick.")
    timezone: str = option(
        zone_name, "", "Time zone of the cron expression; Django's TIME_ZONE if not given."
    )
    queue: str = option(text, "", "Queue of the jobs; the job's own if not given.")
    catch_up: str = option(
        one_of(*CATCH_UPS),
        "one",
        "Which missed ticks get a job: none, the latest one, or all (the latest 100 at most).",
    )
    overlap: str = option(
        one_of(*OVERLAPS), "allow", "skip: no job while that of the previous tick is open."
    )
    jitter: int = option(
        whole_seconds(0, 86_400), 0, "Maximum delay of a job after its tick, in seconds."
    )
    expires_after: int | None = option(
        optional(whole_seconds(1)),
        None,
        "Time after a tick until which its job can start: seconds, or a timedelta.",
    )
    starts_at: datetime | None = option(optional(aware_moment), None, "No tick before this time.")
    ends_at: datetime | None = option(optional(aware_moment), None, "No tick after this time.")
    enabled: bool = option(flag, True, "False: the schedule is declared, but has no ticks.")


def _and(first: str, other: str) -> str:
    return (
        Wording(_("%(first)s and %(other)s"), {"first": first, "other": other}) if first else other
    )


def read_schedule(given: Any, where: str) -> tuple[ScheduleOptions, list[Problem]]:
    """Return the options of a schedule, and what is wrong with them and with their combination."""
    options, problems = read_options(ScheduleOptions, given, where)
    if problems:
        return options, problems
    kinds = [name for name in ("cron", "every", "at") if getattr(options, name)]
    if len(kinds) != 1:
        text = _("%(field)s does not say when; give one of cron, every and at.")
        if kinds:
            text = _("%(field)s has %(names)s; give one of cron, every and at.")
        facts = {"field": where, "names": functools.reduce(_and, kinds, "")}
        problems.append(Problem(Wording(text, facts), ""))
    if options.timezone and not options.cron:
        message = Wording(_("%(field)s goes with cron."), {"field": f"{where}['timezone']"})
        problems.append(Problem(message, "", key="timezone"))
    if options.starts_at and options.ends_at and options.starts_at > options.ends_at:
        message = Wording(_("%(field)s is before starts_at."), {"field": f"{where}['ends_at']"})
        problems.append(Problem(message, "", key="ends_at"))
    return options, problems


@dataclass(frozen=True)
class Settings:
    """The ``KJO`` setting, key by key (attribute names are the keys in lower case)."""

    service_name: str = option(
        name_text, "django", "Names this project in consumer groups and processed_events."
    )
    database: str | None = option(
        optional_text,
        None,
        "Database alias of this app's tables; the router's choice if not given.",
    )
    transports: dict[str, Any] = option(
        mapping,
        {"default": {"BACKEND": "kjo_django.transports.database.DatabaseTransport"}},
        "Transports by alias.",
    )
    coordination: dict[str, Any] = option(
        mapping, {"BACKEND": DEFAULT_COORDINATION}, "The coordination backend."
    )
    queues: dict[str, Any] = option(mapping, {}, "Options by queue name.")
    schedules: dict[str, Any] = option(mapping, {}, "Options by the name of a periodic schedule.")
    middleware: tuple[str, ...] = option(
        texts, (), "Import paths of middleware around each call of a handler, outermost first."
    )
    concurrency: int | None = option(
        optional(whole(1)),
        None,
        "Lanes (threads that run handlers) of a worker. None: four, and one more for each "
        "millisecond that its database takes to answer, sixteen at most.",
    )
    max_attempts: int = option(attempts, 5, "Executions of a job before it is dead-lettered.")
    backoff_base: timedelta = option(
        duration, timedelta(seconds=2), "Delay before the second attempt; doubles each time."
    )
    backoff_max: timedelta = option(duration, timedelta(minutes=10), "Longest back-off delay.")
    backoff_jitter: float = option(number(0, 1), 0.2, "Random part of the delay, from 0 to 1.")
    error_recovery_delays: dict[str, Any] = option(
        mapping,
        {"rate_limit": 30, "network": 10, "database": 5, "default": 0},
        "Minimum seconds before the next attempt, by class of error, for jobs without their "
        "own back-off.",
    )
    pausable_errors: tuple[str, ...] = option(
        texts, (), "Import paths of additional exceptions that pause a partition."
    )
    pause_budget: timedelta = option(
        duration,
        timedelta(hours=24),
        "Time, from the first pause of a message, during which such errors spend no attempt "
        "and the message keeps its place; after that, each error counts.",
    )
    unknown_handler_wait: timedelta | None = option(
        optional_duration,
        timedelta(hours=1),
        "Time for which a job waits for a worker that knows its handler, for example during "
        "a deploy; then it is dead-lettered. None: immediately.",
    )
    timeout: timedelta | None = option(
        optional_duration, timedelta(minutes=30), "Maximum run time of one attempt; None: no limit."
    )
    result_ttl: timedelta = option(
        lifetime, timedelta(hours=1), "How long results and errors are kept; 100 years at most."
    )
    processing_ttl: timedelta = option(
        duration,
        timedelta(seconds=300),
        "Time for which a lease is valid without renewal. After that, other workers run the "
        "jobs of a crashed worker.",
    )
    sent_ttl: timedelta | None = option(
        optional_duration,
        None,
        "Lifetime of a sent mark; by default 20 s, or 2 x a customised PROCESSING_TTL.",
    )
    record_lease: timedelta = option(
        duration,
        timedelta(seconds=30),
        "Time for which a delivered record is leased to a worker, on transports that lease "
        "records; and time before a step that its worker has released is published.",
    )
    max_payload_bytes: int = option(whole(1), 900_000, "Maximum size of a payload in bytes.")
    group_size: int = option(whole(1), 500, "Maximum number of jobs in one transaction.")
    group_budget: timedelta = option(
        duration,
        timedelta(milliseconds=50),
        "Total run time up to which fast jobs share a transaction; longer if the database is "
        "more than 6 ms away.",
    )
    max_outstanding: int = option(
        whole(1),
        5000,
        "Maximum number of records that a worker has, waiting and running. One queue takes at "
        "most as many as it leaves free for the other queues. On transports to which a worker "
        "can give records back, most queues have far fewer: those that can start soon.",
    )
    max_outstanding_bytes: int = option(
        whole(1),
        64 * 1024**2,
        "Maximum bytes of values that a worker has, waiting and running, but always at least "
        "one record; clients of Kafka fetch a quarter of it ahead.",
    )
    async_concurrency: int = option(
        whole(1),
        5000,
        "Number of coroutines of atomic=False handlers that a worker runs at the same time, "
        "for each queue without its own concurrency; MAX_OUTSTANDING limits them, too.",
    )
    async_ramp_up: int = option(
        whole(1),
        100,
        "Number of coroutines of atomic=False handlers of one queue that a worker starts each "
        "second, at most a tenth of them together, in addition to two for each completed one.",
    )
    relay_batch_size: int = option(
        whole(1), 1000, "Maximum rows in one publish; twice that in a backlog."
    )
    relay_batch_bytes: int = option(
        whole(1),
        16 * 1024**2,
        "Maximum bytes of payloads that the relay reads and publishes at a time, but always "
        "at least one row; twice that in a backlog.",
    )
    poll_interval: timedelta = option(
        duration, timedelta(seconds=1), "How often workers look for due jobs."
    )
    heartbeat_interval: timedelta = option(
        duration, timedelta(seconds=5), "How often a worker writes its heartbeat."
    )
    shutdown_grace: timedelta = option(
        duration, timedelta(seconds=10), "Time for running jobs to end when a worker stops."
    )
    status_report_interval: timedelta | None = option(
        optional(duration), None, "How often kjo_consume prints its status. None: not at all."
    )
    job_log_lines: int = option(
        whole(0), 100, "Number of log lines of an attempt that are stored if it fails. 0: none."
    )
    rescue_after: timedelta = option(
        duration,
        timedelta(minutes=15),
        "Time after which an untouched queued job is checked, and published again if its "
        "message is lost.",
    )
    max_replays: int = option(
        whole(1), 5, "Replays of one dead letter before kjo_replay_dlq refuses (loop guard)."
    )
    topic_options: dict[str, Any] = option(mapping, {}, "Default topic options of all queues.")
    event_format: str = option(
        one_of(*EVENT_FORMATS),
        "plain",
        "Format in which publish_event writes events. Events are read in all formats, "
        "regardless of this setting.",
    )
    prune_interval: timedelta | None = option(
        optional_duration,
        timedelta(hours=1),
        "How often a worker deletes rows that are older than the RETENTION_ settings, like "
        "kjo_prune. None: never.",
    )
    retention_completed: timedelta = option(
        duration, timedelta(days=7), "Pruning: completed and cancelled jobs."
    )
    retention_failed: timedelta = option(
        duration, timedelta(days=30), "Pruning: failed jobs and closed dead letters."
    )
    retention_open_dead_letters: timedelta | None = option(
        optional_duration, None, "Pruning: open dead letters; by default kept for ever."
    )
    retention_processed_events: timedelta = option(
        duration,
        timedelta(days=30),
        "Pruning: processed_events; must be longer than the retention of topics.",
    )
    retention_metrics: timedelta = option(
        duration, timedelta(days=30), "Pruning: metric buckets and dead workers."
    )
    release: str = option(
        short_text,
        "",
        "Version of the project's code, shown with workers and errors; a change marks a deploy.",
    )
    dead_letter_exception_headers: bool = option(
        flag,
        True,
        "False: the headers of a record in a dead-letter topic name only the exception's "
        "type. Its message and stack trace, which can quote a payload, are only in the table.",
    )
    redact: tuple[str, ...] = option(
        texts,
        (
            *("password", "passwd", "pwd", "passphrase", "secret", "credential", "token", "cookie"),
            *("api_key", "private_key", "access_key", "auth", "session", "dsn"),
        ),
        "Fields of payloads and results that are never shown: those whose name contains one "
        "of these texts. Case, `-` and `_` are ignored.",
    )
    schema_registry: dict[str, Any] = option(
        mapping,
        {},
        "Options of the client of a Confluent Schema Registry: url, basic.auth.user.info, …; "
        "never shown. For serializers of kjo_django.contrib.schema_registry.",
        is_secret=True,
    )
    operations_queue: str = option(
        text, "default", "Queue of the internal jobs for large replays and changes of jobs."
    )
    metrics_token: str | None = option(
        optional_text,
        None,
        "Token that Prometheus sends as 'Authorization: Bearer …' to the metrics view; hidden.",
        is_secret=True,
    )

    def queue(self, name: str) -> QueueConf:
        """Return the options of a queue, defaults filled in; an undeclared queue has only those."""
        cached = _queue_cache.get(name)
        if cached is not None and cached[0] is self:
            return cached[1]
        merged = {**_declared.get(name, {}), **self.queues.get(name, {})}
        given, problems = read_options(QueueOptions, merged, f"KJO['QUEUES'][{name!r}]")
        if problems:
            raise ImproperlyConfigured(str(problems[0]))
        topic = given.topic or name
        processing_ttl = given.processing_ttl or self.processing_ttl
        result = QueueConf(
            name=name,
            transport=given.transport,
            database=given.database,
            topic=topic,
            levels={level: f"{topic}{LEVELS[level][1]}" for level in _LEVELS_OF[given.priorities]},
            consumer_group=given.consumer_group or f"{self.service_name}-group",
            concurrency=given.concurrency or self.concurrency,
            limit=given.concurrency,
            key_prefix=given.key_prefix or name.upper(),
            processing_ttl=processing_ttl,
            sent_ttl=given.sent_ttl or self.sent_ttl or sent_ttl_for(processing_ttl),
            max_attempts=given.max_attempts or self.max_attempts,
            timeout=given.timeout or self.timeout,
            result_ttl=given.result_ttl or self.result_ttl,
            dead_letter_topic=given.dead_letter_topic or f"{topic}-dlq",
            topic_options={**self.topic_options, **given.topic_options},
            retries=given.retry_queue or name,
            consume=given.consume,
            rate=None if given.rate is None else replace(given.rate, burst=given.burst),
            event_format=given.event_format or self.event_format,
        )
        _queue_cache[name] = (self, result)
        return result


def databases_on(settings: Settings, transport: str) -> set[str | None]:
    """Return the databases of the queues on a transport; None is that of all other queues."""
    queues = [settings.queue(name) for name in {*settings.queues, *_declared}]
    found = {queue.database for queue in queues if queue.transport == transport}
    # A queue that nobody declares is on this one.
    return found | {None} if transport == QueueOptions.transport else found


def sent_ttl_for(processing_ttl: timedelta) -> timedelta:
    """Return how long a sent mark lasts with this PROCESSING_TTL, without SENT_TTL."""
    if processing_ttl == timedelta(seconds=300):
        return timedelta(seconds=20)
    return 2 * processing_ttl


@dataclass(frozen=True)
class QueueConf:
    """A queue with every default filled in."""

    name: str
    transport: str
    database: str | None
    """The alias of its database; None: that of ``KJO["DATABASE"]`` or of the routers."""
    topic: str
    consumer_group: str
    concurrency: int | None
    """Groups of it that a worker runs at once; None: as many as the worker has lanes."""
    limit: int | None
    """The queue's own concurrency; None where it has none."""
    key_prefix: str
    processing_ttl: timedelta
    sent_ttl: timedelta
    max_attempts: int
    timeout: timedelta | None
    result_ttl: timedelta
    dead_letter_topic: str
    topic_options: Mapping[str, Any]
    retries: str
    """The name of the queue that holds the retries of its messages."""
    levels: Mapping[int, str]
    """The topic of each of its levels of priority, the most urgent one first; ``topic`` is that of
    level 0, which every queue has."""
    consume: bool = True
    rate: Rate | None = None
    """How many of its jobs all workers together start in a time."""
    event_format: str = EVENT_FORMATS[0]

    @property
    def topics(self) -> list[str]:
        """The topics of all levels."""
        return list(self.levels.values())

    def level_of(self, priority: int | None) -> int:
        """Return the level of a priority; the next one where the queue does not have it."""
        level = level_of(priority or 0)
        return min(max(level, min(self.levels)), max(self.levels))

    def keyed_priority(self, priority: int) -> int:
        """Return the priority of jobs with a key: that of the level, so that all jobs of the key
        and level have one. A queue with one level distinguishes all four here."""
        levels = self.levels if len(self.levels) > 1 else LEVELS
        return priority_of(min(max(level_of(priority), min(levels)), max(levels)))

    def level_in(self, topic: str) -> int:
        """Return the level that has a topic; 0 where none has it."""
        return next((level for level, name in self.levels.items() if name == topic), 0)

    def priorities_of(self, level: int) -> tuple[int, int]:
        """Return the least and the highest priority of a level."""
        least = -MAX_PRIORITY if level == min(self.levels) else LEVELS[level][0]
        above = [LEVELS[other][0] for other in self.levels if other > level]
        return least, min(above, default=MAX_PRIORITY + 1) - 1


_queue_cache: dict[str, tuple[Settings, QueueConf]] = {}
_declared: dict[str, dict[str, Any]] = {}


def check_queue_options(options: Mapping[str, Any], function: str, *own: str) -> None:
    """Check what a function passes on as the options of a queue.

    :param function: how its caller wrote it.
    :param own: names of the function's own options, which may be meant.
    :raises TypeError: an option is not known; says which one was meant.
    :raises ValueError: the value of one means nothing.
    """
    refuse_unknown(options, {*own, *(field.name for field in fields(QueueOptions))}, function)
    _, problems = read_options(QueueOptions, options, f"{function}()")
    if problems:
        raise ValueError(str(problems[0]))


def declare_queue(name: str, **options: Any) -> None:
    """Declare a queue in code, as template consumers do; ``KJO["QUEUES"]`` wins key by key.

    :param options: those of ``QueueOptions``.
    """
    _declared[name] = options
    _queue_cache.pop(name, None)


def declared_queues() -> list[str]:
    """Return the names of queues declared in code."""
    return list(_declared)


@contextmanager
def restoring(*stores: dict[Any, Any]) -> Iterator[None]:
    """Give the stores, and the queues declared in code, the content at the end that they have now.

    The stores are changed in place: whoever holds one sees its content.
    """
    before = [(store, dict(store)) for store in (_declared, *stores)]
    try:
        yield
    finally:
        for store, content in before:
            store.clear()
            store.update(content)
        _queue_cache.clear()


# --- Reading --------------------------------------------------------------------------------------


_TEXTS = (text, name_text, optional_text, short_text)


@functools.lru_cache(maxsize=1)
def _load() -> tuple[Settings, list[Problem]]:
    given = getattr(django_settings, "KJO", {})
    if isinstance(given, Mapping):
        given = {**_from_environment(), **given}
    return read_options(Settings, given, "KJO", upper=True)


def _from_environment() -> dict[str, Any]:
    """Return the settings that the environment gives; an empty variable gives none."""
    found: dict[str, Any] = {}
    if brokers := os.environ.get("KJO_KAFKA_BROKERS"):
        found["TRANSPORTS"] = {
            "default": {
                "BACKEND": "kjo_django.transports.kafka.KafkaTransport",
                "OPTIONS": {"bootstrap.servers": brokers},
            }
        }
    if url := os.environ.get("KJO_REDIS_URL"):
        found["COORDINATION"] = {
            "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
            "OPTIONS": {"URL": url},
        }
    for field in fields(Settings):
        if given := os.environ.get(f"KJO_{field.name.upper()}"):
            try:
                value = json.loads(given)
            except ValueError:
                value = given
            if field.metadata["convert"] in _TEXTS and not isinstance(value, str | None):
                value = given
            found[field.name.upper()] = value
    return found


def problems() -> list[Problem]:
    """Return every fault of the settings, for the system checks."""
    return list(_load()[1])


def get_settings() -> Settings:
    """Return the settings in force.

    :raises ImproperlyConfigured: naming the first key that is unknown or of a wrong type, so that
        nothing runs on a value somebody did not mean.
    """
    loaded, faults = _load()
    if faults:
        raise ImproperlyConfigured(str(faults[0]))
    return loaded


def settings_as_read() -> Settings:
    """Return the settings with each faulty key at its default.

    For declarations while modules are imported: raising there would end every command with a
    traceback, also ``check``, which names all faults. Code that runs later uses ``get_settings``.
    """
    loaded, _ = _load()
    right = {
        name: given
        for name, given in loaded.queues.items()
        if not read_options(QueueOptions, given, "")[1]
    }
    return loaded if right == loaded.queues else replace(loaded, queues=right)


def default_worker_name() -> str:
    """Return ``<host>-<pid>``."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "KJO":
        _load.cache_clear()
        _queue_cache.clear()


setting_changed.connect(_reset, dispatch_uid="kjo_django.conf")
