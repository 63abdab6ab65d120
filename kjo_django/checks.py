"""System checks: every fault of the settings with what to do about it.

Nothing here opens a connection, but for ``check --deploy``, which asks the servers too.

======  ============================================================================================
E001    a value of a wrong type
E002    an unknown key
E003    a queue or handler on a transport that is not declared
E004    a transport that cannot be made: its BACKEND or OPTIONS
E005    the coordination that cannot be made
E006    a fault in topic_options
E007    an unknown database alias
E008    PAUSABLE_ERRORS or ERROR_RECOVERY_DELAYS that mean nothing
E009    OPTIONS in TASKS that are wrong (contrib.tasks)
E010    a queue in TASKS that cannot carry tasks (contrib.tasks)
E011    USE_TZ is off
E012    messages in another database than their jobs
E013    a topic that the transport cannot name so
E014    middleware that cannot be imported, or cannot stand around a handler
E015    an entry of SCHEDULES that means nothing, or whose job cannot be enqueued
E018    the topic of a level of priority that is another queue's
E019    an isolation level or a character set of MariaDB or MySQL that jobs cannot use
E020    a SERVICE_NAME that no CloudEvent can have as its source
E021    a SCHEMA_REGISTRY, a schema or its options that cannot be used (contrib.schema_registry)
E022    enqueue_on_save of a model in another database than the jobs of the queue
E023    TASKS that name KJOBackend without kjo_django in INSTALLED_APPS (contrib.tasks)
E024    a queue whose name no address can hold
W001    SENT_TTL shorter than PROCESSING_TTL
W002    topic_options that contradict themselves or stop producers
W003    PROCESSING_TTL shorter than three heartbeats
W004    a database in memory, which no worker process can share
W005    processed_events kept shorter than a topic keeps its messages
W006    a handler's queue that looks like a misspelt one
W007    back-off that starts above its cap
W008    (deploy) a transport out of reach
W009    (deploy) coordination out of reach
W010    (deploy) topics that are missing or different
W011    a pool of connections smaller than what a worker needs
W012    DATABASE is not where routers look for this app's tables
W013    (deploy) a pooler in transaction mode, and what needs a setting because of it
W014    a producer's topic or stream that no queue or consumer declares
W018    a job's priority on a queue of a broker that has one level
W019    (deploy) a queue's database without the tables of this app
W020    a file of SQLite without the options that several processes need
W021    the backport django_tasks beside Django's own tasks, which are served (contrib.tasks)
======  ============================================================================================
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.utils import translation
from django.utils.module_loading import import_string

from kjo_django import conf, registry, runtime
from kjo_django.conf import Settings, databases_on, get_settings
from kjo_django.engine.handler.call import refusals
from kjo_django.enqueue.definition import save_fault, save_hooks
from kjo_django.models import Job
from kjo_django.operations.maintenance import topics
from kjo_django.operations.monitoring.health import PROBE_TIMEOUT, deploy_checks, missing_tables
from kjo_django.patterns.declared import declared_producers, path_of
from kjo_django.patterns.events import cloudevents
from kjo_django.patterns.items.producer import AbstractProducer
from kjo_django.patterns.streams import AbstractStreamProducer
from kjo_django.round_trips import NEAR_LANES
from kjo_django.schedules.declarations import setting_faults
from kjo_django.values import Problem, did_you_mean, queue_name, read_options

TAG = "kjo"
CONNECTIONS_BESIDE_LANES = 13
"""Of a worker's threads that run no handlers, at most; docs/how-to/production.md lists them."""
_POOL_SIZE = 4
"""Of psycopg_pool, where nobody says."""
Messages = Iterator[checks.CheckMessage]


@checks.register(TAG)
def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check the ``KJO`` setting; what builds on a wrong one is not checked."""
    problems = conf.problems()
    if problems:
        return [_error_of(problem) for problem in problems]
    settings = get_settings()
    found: list[checks.CheckMessage] = []
    for group in (_BASIC_CHECKS, _CHECKS, _WARNINGS):
        found += (message for check in group for message in check(settings))
        if any(message.is_serious() for message in found):
            break
    return found


@checks.register(TAG, deploy=True)
def check_servers(**kwargs: Any) -> list[checks.CheckMessage]:
    """Ask the servers; only for ``check --deploy``, and only once the settings are right."""
    if any(message.is_serious() for message in check_settings()):
        return []
    with translation.override(None):  # as Django's checks, these are in English
        return [*deploy_checks(), *_warn_missing_tables()]


def _warn_missing_tables() -> Messages:
    for alias in runtime.databases()[1:]:
        with runtime.use_database(alias):
            advice = missing_tables(PROBE_TIMEOUT)
        if advice:
            yield checks.Warning(
                f"KJO['QUEUES'][…]['database'] is {alias!r}, which lacks the tables of kjo_django.",
                hint=advice,
                id="kjo.W019",
            )


# --- Errors -------------------------------------------------------------------------------------


def _check_queues(settings: Settings) -> Messages:
    declared = f"Declared: {', '.join(settings.transports) or 'none'}."
    for name in registry.queue_names():
        where = f"KJO['QUEUES'][{name!r}]"
        queue, problems = read_options(conf.QueueOptions, settings.queues.get(name, {}), where)
        yield from map(_error_of, problems)
        try:
            queue_name(name)
        except ValueError as error:
            yield checks.Error(
                f"The name of a queue must be {error}, not {name!r:.120}.",
                hint="Addresses of the REST API and the dashboard cannot contain it. A topic can "
                "have another name than its queue: KJO['QUEUES'][…]['topic'].",
                id="kjo.E024",
            )
        if queue.transport not in settings.transports:
            yield checks.Error(
                f"{where} uses the transport {queue.transport!r}, which "
                "KJO['TRANSPORTS'] does not declare.",
                hint=did_you_mean(queue.transport, settings.transports, declared),
                id="kjo.E003",
            )


def _check_backends(settings: Settings) -> Messages:
    """Make each backend, which connects to nothing."""
    backends: list[tuple[Callable[[], object], Any, str]] = [
        (functools.partial(runtime.get_transport, alias), declared, "kjo.E004")
        for alias, declared in settings.transports.items()
    ]
    backends.append((runtime.get_coordination, settings.coordination, "kjo.E005"))
    for make, declared, id in backends:
        try:
            make()
        except (ImproperlyConfigured, ImportError) as error:
            path = str(declared.get("BACKEND", "")) if isinstance(declared, dict) else ""
            needs_redis = path.startswith("kjo_django.") and "redis" in path
            hint = "Is the extra installed? pip install 'kjo-django[redis]'"
            yield checks.Error(str(error), hint=hint if needs_redis else None, id=id)


def _check_topics(settings: Settings) -> Messages:
    errors, warnings = topics.problems()
    for problem in errors:
        yield checks.Error(problem.message, hint=problem.hint or None, id="kjo.E006")
    for problem in warnings:
        yield checks.Warning(problem.message, hint=problem.hint or None, id="kjo.W002")


def _check_database(settings: Settings) -> Messages:
    declared = f"Declared: {', '.join(django_settings.DATABASES)}."
    named: dict[str, Any] = {"KJO['DATABASE']": settings.database}
    for name, given in settings.queues.items():
        if isinstance(given, dict):
            named[f"KJO['QUEUES'][{name!r}]['database']"] = given.get("database")
    places = {f"KJO['TRANSPORTS'][{alias!r}]": each for alias, each in settings.transports.items()}
    for where, backend in {**places, "KJO['COORDINATION']": settings.coordination}.items():
        given = backend.get("OPTIONS") if isinstance(backend, dict) else None
        options = given if isinstance(given, dict) else {}
        for key in ("DATABASE", "LISTEN_DATABASE"):
            named[f"{where}['OPTIONS'][{key!r}]"] = options.get(key)
    for where, alias in named.items():
        if alias is not None and alias not in django_settings.DATABASES:
            yield checks.Error(
                f"{where} is {alias!r}, which DATABASES does not declare.",
                hint=did_you_mean(str(alias), django_settings.DATABASES, declared),
                id="kjo.E007",
            )


def _check_time_zones(settings: Settings) -> Messages:
    if not django_settings.USE_TZ:
        yield checks.Error(
            "USE_TZ is off: datetimes of the database cannot be compared with those of brokers and "
            "of other hosts.",
            hint="Set USE_TZ = True, Django's default. Templates may still show local time.",
            id="kjo.E011",
        )


def _check_errors(settings: Settings) -> Messages:
    known = ("rate_limit", "network", "database", "default")
    for name, value in settings.error_recovery_delays.items():
        if name not in known:
            yield checks.Error(
                f"KJO['ERROR_RECOVERY_DELAYS'] has an unknown class of errors {name!r}.",
                hint=did_you_mean(name, known, f"Known: {', '.join(known)}."),
                id="kjo.E008",
            )
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            yield checks.Error(
                f"KJO['ERROR_RECOVERY_DELAYS'][{name!r}] must be a number of seconds, at least 0, "
                f"not {value!r:.80}.",
                id="kjo.E008",
            )
    for path in settings.pausable_errors:
        if "." in path and not _is_exception(path):
            yield checks.Error(
                f"KJO['PAUSABLE_ERRORS'] names {path!r}, which is not an exception that "
                "can be imported.",
                id="kjo.E008",
            )


def _check_topic_names(settings: Settings) -> Messages:
    for name in registry.queue_names():
        queue = settings.queue(name)
        pattern = runtime.transport_class(queue.transport).topic_name
        for topic in dict.fromkeys((*queue.topics, queue.dead_letter_topic)):
            if pattern is not None and topic and not pattern.fullmatch(topic):
                yield checks.Error(
                    f"The topic {topic!r} of the queue {name!r} has a name that the transport "
                    f"{queue.transport!r} cannot give it; it must match {pattern.pattern}.",
                    hint=f"Name it: KJO['QUEUES'][{name!r}]['topic'].",
                    id="kjo.E013",
                )
                break


def _check_levels(settings: Settings) -> Messages:
    """The topic of a level is its queue's alone: what others publish there would have the level."""
    queues = [settings.queue(name) for name in registry.queue_names()]
    owners = {
        (queue.transport, topic): queue.name
        for queue in queues
        for topic in dict.fromkeys((queue.topic, queue.dead_letter_topic))
    }
    for queue in queues:
        for level, topic in queue.levels.items():
            owner = owners.get((queue.transport, topic))
            if level and owner is not None:
                yield checks.Error(
                    f"KJO['QUEUES'][{queue.name!r}]['priorities'] is {len(queue.levels)}, so the "
                    f"queue needs the topic {topic!r}, which is the queue {owner!r}'s.",
                    hint="Give one of them another 'topic'.",
                    id="kjo.E018",
                )


def _warn_priorities(settings: Settings) -> Messages:
    for handler in registry.handlers():
        queue = settings.queue(handler.options.queue)
        keeps_order = runtime.transport_class(queue.transport).capabilities.priority
        if handler.options.priority and len(queue.levels) == 1 and not keeps_order:
            yield checks.Warning(
                f"The job {handler.name!r} has priority={handler.options.priority}, and its queue "
                f"{queue.name!r} has one level: it runs in topic order, like all others.",
                hint=f"KJO['QUEUES'][{queue.name!r}]['priorities'] = 2, 3 or 4 gives each level a "
                "topic of its own.",
                id="kjo.W018",
            )


def _check_middleware(settings: Settings) -> Messages:
    try:
        for refused in refusals(settings.middleware):
            yield checks.Error(
                refused,
                hint="Django's sync_and_async_middleware, of django.utils.decorators, makes one "
                "that is both; docs/how-to/middleware.md shows how.",
                id="kjo.E014",
            )
    except ImproperlyConfigured as error:
        yield checks.Error(str(error), id="kjo.E014")


def _check_event_source(settings: Settings) -> Messages:
    queues = {
        f"KJO['QUEUES'][{name!r}]['event_format']": settings.queue(name).event_format
        for name in settings.queues
    }
    formats = {"KJO['EVENT_FORMAT']": settings.event_format, **queues}
    where = next((where for where, each in formats.items() if each != cloudevents.PLAIN), None)
    if where is not None and not cloudevents.is_uri_reference(settings.service_name):
        yield checks.Error(
            f"KJO['SERVICE_NAME'] is {settings.service_name!r}, not a URI reference, as the "
            f"source of a CloudEvent must be; {where} is {formats[where]!r}.",
            hint="A name of letters, digits and hyphens is one.",
            id="kjo.E020",
        )


def _check_schedules(settings: Settings) -> Messages:
    for problem in setting_faults(settings):
        yield checks.Error(problem.message, hint=problem.hint or None, id="kjo.E015")


# --- Warnings -----------------------------------------------------------------------------------


def _warn_ttls(settings: Settings) -> Messages:
    if settings.sent_ttl is not None and settings.sent_ttl < settings.processing_ttl:
        yield checks.Warning(
            f"KJO['SENT_TTL'] ({settings.sent_ttl}) is shorter than PROCESSING_TTL "
            f"({settings.processing_ttl}): a template producer sends items again that are still "
            "being processed.",
            hint="Remove SENT_TTL; twice PROCESSING_TTL is used then.",
            id="kjo.W001",
        )
    if settings.processing_ttl < 3 * settings.heartbeat_interval:
        yield checks.Warning(
            f"KJO['PROCESSING_TTL'] ({settings.processing_ttl}) is shorter than three times "
            f"HEARTBEAT_INTERVAL ({settings.heartbeat_interval}): a busy worker may lose its jobs "
            "to another one.",
            hint="Raise PROCESSING_TTL or lower HEARTBEAT_INTERVAL.",
            id="kjo.W003",
        )
    if settings.backoff_base > settings.backoff_max:
        yield checks.Warning(
            f"KJO['BACKOFF_BASE'] ({settings.backoff_base}) is above BACKOFF_MAX "
            f"({settings.backoff_max}): every retry waits the same.",
            hint="Raise BACKOFF_MAX.",
            id="kjo.W007",
        )


def _is_in_memory(database: Mapping[str, Any]) -> bool:
    name = str(database.get("NAME", ""))
    is_address = name.startswith("file:") and (":memory:" in name or "mode=memory" in name)
    return name == ":memory:" or is_address


def _warn_memory_database(settings: Settings) -> Messages:
    alias = runtime.jobs_database()
    database = django_settings.DATABASES.get(alias, {})
    # Django's own, of a test run, where nobody starts a worker.
    is_of_tests = str(database.get("NAME", "")).startswith("file:memorydb_")
    if "sqlite3" in database.get("ENGINE", "") and _is_in_memory(database) and not is_of_tests:
        yield checks.Warning(
            f"The database {alias!r} is in the memory of one process: no worker sees the "
            "jobs stored there.",
            hint="Give DATABASES a file name, unless everything runs in one process, as in tests.",
            id="kjo.W004",
        )


def _warn_sqlite_options(settings: Settings) -> Messages:
    """With Django's defaults readers and the writer wait for each other, and a transaction that has
    read before it writes is refused at once where another has written meanwhile."""
    for alias in runtime.databases():
        database = django_settings.DATABASES.get(alias, {})
        engine = database.get("ENGINE", "").rpartition(".")[2]
        if engine not in ("sqlite3", "spatialite") or _is_in_memory(database):
            continue
        options = database.get("OPTIONS", {})
        begins_writing = str(options.get("transaction_mode")).upper() in ("IMMEDIATE", "EXCLUSIVE")
        commands = str(options.get("init_command")).lower()
        has_log = re.search(r"journal_mode\s*[=(]\s*['\"]?wal", commands)
        missing = {
            '"init_command": "PRAGMA journal_mode=WAL"': not has_log,
            '"transaction_mode": "IMMEDIATE"': not begins_writing,
            '"timeout": 30': not options.get("timeout") and "busy_timeout" not in commands,
        }
        if lacking := [text for text, is_missing in missing.items() if is_missing]:
            yield checks.Warning(
                f"DATABASES[{alias!r}] is an SQLite file with options for one process: while a "
                'worker is busy, enqueue() and your own saves raise "database is locked".',
                hint=f"Add to DATABASES[{alias!r}]['OPTIONS']: {{{', '.join(lacking)}}}. "
                "docs/how-to/production.md says why.",
                id="kjo.W020",
            )


def _check_one_database(settings: Settings) -> Messages:
    """Only where both are in one database is a message there if and only if its job is."""
    usual = runtime.default_database()
    for alias, declared in settings.transports.items():
        if not runtime.transport_class(alias).capabilities.transactional:
            continue
        # Of a transport whose queues have several, _check_backends tells.
        jobs = next(iter(databases_on(settings, alias)), None) or usual
        given = declared.get("OPTIONS", {}).get("DATABASE") or jobs
        if given != jobs:
            yield checks.Error(
                f"KJO['TRANSPORTS'][{alias!r}]['OPTIONS']['DATABASE'] is {given!r}, the jobs are "
                f"in {jobs!r}: a worker would read messages of jobs that are not committed yet.",
                hint="Remove it; messages are where the jobs are.",
                id="kjo.E012",
            )


def _check_mysql(settings: Settings) -> Messages:
    """At other levels InnoDB's transactions go on reading what was there when they began; other
    character sets have no room for every text."""
    needed = {"isolation_level": "read committed", "charset": "utf8mb4"}
    for alias in runtime.databases():
        database = django_settings.DATABASES.get(alias, {})
        options = database.get("OPTIONS", {})
        for name, value in needed.items() if "mysql" in database.get("ENGINE", "") else ():
            given = options.get(name, value)
            if str(given).lower() != value:
                yield checks.Error(
                    f"DATABASES[{alias!r}]['OPTIONS'][{name!r}] is {given!r}; jobs need {value!r}.",
                    hint="Remove it: this is what Django uses.",
                    id="kjo.E019",
                )


def _check_save_hooks(settings: Settings) -> Messages:
    for model, job in save_hooks:
        if fault := save_fault(model, job, router.db_for_write(model)):
            yield checks.Error(fault, id="kjo.E022")


def _warn_router(settings: Settings) -> Messages:
    chosen = router.db_for_write(Job)
    if settings.database is not None and settings.database != chosen:
        yield checks.Warning(
            f"KJO['DATABASE'] is {settings.database!r}, and DATABASE_ROUTERS send this app's "
            f"models to {chosen!r}: workers and commands use the one, the admin and your own "
            "queries, such as Job.objects, the other.",
            hint="Add a router that sends the app kjo_django there; KJO['DATABASE'] is not needed "
            "then. docs/how-to/production.md has one.",
            id="kjo.W012",
        )


def _warn_pool(settings: Settings) -> Messages:
    """Each thread of a worker keeps the connection it was given: others would wait in vain."""
    lanes = settings.concurrency or NEAR_LANES
    needed = lanes + CONNECTIONS_BESIDE_LANES
    for alias in runtime.databases():
        pool = django_settings.DATABASES.get(alias, {}).get("OPTIONS", {}).get("pool")
        sizes = pool if isinstance(pool, dict) else {}
        size = sizes.get("max_size") or sizes.get("min_size", _POOL_SIZE)
        if pool and size < needed:
            yield checks.Warning(
                f"The pool of the database {alias!r} has {size} connections, a worker with "
                f"{lanes} lanes keeps up to {needed}: its threads would wait for one another.",
                hint=f"Set OPTIONS['pool'] = {{'max_size': {needed}}} or more, or no pool for "
                "workers.",
                id="kjo.W011",
            )


def _warn_retention(settings: Settings) -> Messages:
    """A message that comes again after its marker is gone takes effect twice."""
    for name in registry.queue_names():
        queue = settings.queue(name)
        if not runtime.transport_class(queue.transport).capabilities.replay:
            continue
        options = topics.read_options(queue.topic_options, "")[0]
        retention = options.config.get("retention.ms", "")
        if retention == "-1":
            kept = timedelta.max
        elif retention.isdigit():
            kept = timedelta(milliseconds=int(retention))
        else:
            continue  # the broker's default, which nobody named
        if settings.retention_processed_events < kept:
            yield checks.Warning(
                f"KJO['RETENTION_PROCESSED_EVENTS'] ({settings.retention_processed_events}) is "
                f"shorter than the topic {queue.topic!r} keeps its messages ({kept}): one that is "
                "read again could take effect twice.",
                hint="Raise RETENTION_PROCESSED_EVENTS.",
                id="kjo.W005",
            )


def _warn_misspelt_queues(settings: Settings) -> Messages:
    """An undeclared queue is legal and has the defaults; one letter off, it is a mistake."""
    for handler in registry.handlers():
        name = handler.options.queue
        if name in settings.queues or name == "default":
            continue
        close = difflib.get_close_matches(name, settings.queues, n=1, cutoff=0.75)
        if close:
            yield checks.Warning(
                f"The job {handler.name!r} uses the queue {name!r}, which KJO['QUEUES'] does not "
                "declare.",
                hint=f"Did you mean {close[0]!r}? Otherwise declare it: {{{name!r}: {{}}}}.",
                id="kjo.W006",
            )


def _warn_unread_topics(settings: Settings) -> Messages:
    """What is sent to a misspelt topic or stream is taken, and nobody ever reads it.

    A stream's tasks are for this project; a template producer may well work for another service, so
    only a topic that is nearly one of ours is taken for a mistake.
    """
    read = {settings.queue(name).topic for name in registry.queue_names()}
    sent = [
        (path_of(each), each.stream_key, True)
        for each in declared_producers(AbstractStreamProducer)
        if getattr(each, "stream_key", "")
    ]
    for producer in declared_producers(AbstractProducer):
        # A producer that cannot be made says so itself, or wants arguments.
        with suppress(ImproperlyConfigured, TypeError):
            sent.append((path_of(producer), producer().target.topic, False))
    for path, topic, is_ours in sent:
        close = difflib.get_close_matches(topic, read, n=1, cutoff=0.6 if is_ours else 0.75)
        if topic in read or not (is_ours or close):
            continue
        meant = f"Did you mean {close[0]!r}? Otherwise declare" if close else "Declare"
        yield checks.Warning(
            f"{path} sends to {topic!r}, which no queue and no consumer declares.",
            hint=f"{meant} it: KJO['QUEUES'] = {{{topic!r}: {{}}}}, with 'consume': False where "
            "another service reads it.",
            id="kjo.W014",
        )


# --- Details ------------------------------------------------------------------------------------


def _error_of(problem: Problem) -> checks.Error:
    return checks.Error(
        problem.message,
        hint=problem.hint or None,
        id="kjo.E002" if problem.is_unknown_key else "kjo.E001",
    )


def _is_exception(path: str) -> bool:
    try:
        found = import_string(path)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, BaseException)


_BASIC_CHECKS = (_check_queues, _check_database, _check_time_zones)
_CHECKS = (_check_backends, _check_topics, _check_errors, _check_middleware, _check_schedules)
_WARNINGS = (
    _warn_ttls,
    _warn_memory_database,
    _warn_sqlite_options,
    # Errors, which can be seen once the transports can be made.
    _check_one_database,
    _check_mysql,
    _check_save_hooks,
    _check_topic_names,
    _check_levels,
    _check_event_source,
    _warn_priorities,
    _warn_router,
    _warn_pool,
    _warn_retention,
    _warn_misspelt_queues,
    _warn_unread_topics,
)
