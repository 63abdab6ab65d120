"""Health checks in the order of their dependencies, each with its remedy, within a timeout.

A run has one thread of its own, which the caller waits for until the time is up: connecting to a
server that is away may hang for minutes. A check that needs something broken is not made.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.core import checks as django_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models import Sum
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from kjo_django import conf as configuration
from kjo_django import registry
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf, get_settings
from kjo_django.exceptions import CoordinationError, KjoError, PublishError
from kjo_django.ids import ago
from kjo_django.logs import get_logger
from kjo_django.models import Job, MetricBucket, Worker
from kjo_django.operations.maintenance import topics
from kjo_django.operations.monitoring import status
from kjo_django.operations.queues import overview, paused_queues
from kjo_django.operations.translations import decimal
from kjo_django.operations.workers import THREADS_DIED
from kjo_django.probing import answer_within, is_timeout
from kjo_django.runtime import (
    Runtime,
    current_runtime,
    databases,
    get_coordination,
    get_transport,
    jobs_database,
    transport_class,
    use_database,
)
from kjo_django.schedules import shown as schedules_shown

logger = get_logger("kjo_django")

SETTINGS, DATABASE, COORDINATION, TRANSPORTS = "settings", "database", "coordination", "transports"
TOPICS, RELAY, WORKERS, LAG = "topics", "relay", "workers", "lag"
CLOCKS, HANDLERS = "clocks", "handlers"
FAILURES, PROGRESS, SCALING = "failures", "progress", "scaling"
LANES, RESCUES, SCHEDULES = "lanes", "rescues", "schedules"

# Advice is translated when a check has ended.
ASK_AGAIN = gettext_noop(
    "It may be well: ask again with more time, such as manage.py kjo_health --timeout 30."
)
SILENCE = gettext_noop(
    "It is not known whether it is stopped, overloaded or cut off: look at the server and the "
    "network, or ask again with more time, such as manage.py kjo_health --timeout 30. "
    "Workers wait for it; do not restart them."
)
"""What to do about a server that gave no answer at all, as one that refuses a connection does."""
UNKNOWN = gettext_noop(
    "This could not be found out: put right what the error names, then ask again."
)
LISTED = 10
"""Workers that are named at most."""
LEAST_EXECUTIONS = 10
"""Below this many in the window a failure rate says nothing."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The limits within which a system is healthy."""

    lag: int = 100
    """Messages that a queue's group may be behind."""
    failure_rate: float = 0.10
    """Share of the finished jobs of the last ``idle`` that may have failed."""
    idle: timedelta = timedelta(seconds=300)
    """How long due jobs may wait; also the time over which the failure rate is measured."""
    relay_age: timedelta = timedelta(seconds=60)
    """How long a due job may wait for the relay."""
    clock: timedelta = timedelta(seconds=5)
    """By how much a host's clock may differ from the database's."""


@dataclass(slots=True)
class Check:
    """The result of one check. ``ok`` is None if it was not made. A check that is ok and has a
    ``fix`` is a warning. ``detail`` and ``fix`` are in the language that was active when it was
    made."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether it found out nothing: it was not made, or there was no answer in time."""
        return self.ok is None or self.fix in (_(SILENCE), _(ASK_AGAIN))


@dataclass(frozen=True, slots=True)
class _Probe:
    name: str
    ask: Callable[[Thresholds, float], tuple[bool, str, str]]
    """Called with the thresholds and the seconds left; returns whether it is ok, the detail and the
    fix. An exception is the detail of a failure."""
    fix: str
    needs: tuple[str, ...] = field(default=(SETTINGS,))
    asks_servers: bool = False
    """Whether it asks servers: one that does not answer in time is out of reach."""


def health(
    timeout: float = 5.0,
    thresholds: Thresholds | None = None,
    only: Collection[str] | None = None,
) -> list[Check]:
    """Return the results of all checks, in order, after at most about ``timeout`` seconds. Their
    texts are in the active language.

    :param only: names of the checks to make, and of those that they need; None: all.
    """
    probes = [probe for probe in PROBES if only is None or probe.name in only]
    deadline = time.monotonic() + timeout
    checks: dict[str, Check] = {}
    asked_at: dict[str, float] = {}

    def run() -> None:
        for probe in probes:
            now = asked_at[probe.name] = time.monotonic()
            if now >= deadline:
                return
            checks[probe.name] = _unchecked(probe, checks) or _answer(
                probe, thresholds or Thresholds(), max(0.1, deadline - now)
            )

    with suppress(TimeoutError):
        answer_within(timeout, run)
    found: dict[str, Check] = {}
    for probe in probes:
        seconds = deadline - asked_at.get(probe.name, deadline)
        check = checks.get(probe.name) or _unchecked(probe, found)
        found[probe.name] = check or _unanswered(probe, seconds)
    return list(found.values())


def _unanswered(probe: _Probe, seconds: float) -> Check:
    """Return the result of a check that has not ended in time.

    :param seconds: since it began; not above 0: it did not begin.
    """
    if seconds <= 0:
        return Check(probe.name, None, _("not checked: the time was up"))
    fix = _(SILENCE if probe.asks_servers else ASK_AGAIN)
    return Check(
        probe.name, False, _("timed out: no answer within %s s") % decimal(seconds, 1), fix
    )


def health_everywhere(timeout: float = 5.0, thresholds: Thresholds | None = None) -> list[Check]:
    """Return the results of all checks for each database that holds jobs, after at most about
    ``timeout`` seconds. A check of another than the first bears its alias: ``database@jobs2``."""
    try:
        aliases = databases()
    except ImproperlyConfigured:
        return health(timeout, thresholds)  # which tells what is wrong with the settings
    found: list[Check] = []
    for alias in aliases:
        with use_database(alias):
            checks = health(timeout / len(aliases), thresholds)
        for check in checks if found else ():
            check.name = f"{check.name}@{alias}"
        found += checks
    return found


def _answer(probe: _Probe, thresholds: Thresholds, seconds: float) -> Check:
    try:
        ok, detail, fix = probe.ask(thresholds, seconds)
    except Exception as error:
        return Check(probe.name, False, f"{type(error).__name__}: {error}", _remedy(probe, error))
    return Check(probe.name, ok, detail, _(fix if ok else fix or probe.fix))


def _remedy(probe: _Probe, error: BaseException) -> str:
    """Return what to do about a probe that ended with an error: it has not found what it looks for,
    so its own advice holds only where it looks for a server or for settings."""
    if is_timeout(error):
        return _(SILENCE if probe.asks_servers else ASK_AGAIN)
    return _(probe.fix if probe.asks_servers or probe.name == SETTINGS else UNKNOWN)


def _unchecked(probe: _Probe, checks: Mapping[str, Check]) -> Check | None:
    """Return the result of a check that needs something broken, None for any other check."""
    broken = [name for name in probe.needs if not checks[name].ok]
    if not broken:
        return None
    gave_none = checks[broken[0]].is_unknown
    why = _("not checked: %s gave no answer") if gave_none else _("not checked: %s is not well")
    return Check(probe.name, None, why % broken[0])


def lag_by_partition(timeout: float) -> dict[str, dict[str, int]] | None:
    """Return the lag of each consumed queue by partition, or None if it takes longer than that or
    a transport is away."""

    def ask() -> dict[str, dict[str, int]]:
        names = ("topic", "topics", "transport", "consumer_group")
        rows = []
        for name in registry.consumed_queue_names():
            queue = conf.queue(name)
            rows.append({"queue": name} | {each: getattr(queue, each) for each in names})
        status.add_lags(rows)
        for row in rows:
            if row["lag_error"]:
                raise PublishError(row["lag_error"])
        return {row["queue"]: row["lag_by_partition"] for row in rows}

    try:
        conf = get_settings()
        return answer_within(timeout, ask, share=("lag", id(conf)))
    except Exception as error:
        logger.warning("The lag cannot be asked for: %s", error)
        return None


def is_healthy(checks: Iterable[Check]) -> bool:
    """Whether every check passed."""
    return all(check.ok for check in checks)


# --- The probes, in the order of their dependencies ---------------------------------------------


def _settings(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    problems = configuration.problems()
    if problems:
        return False, problems[0].message, problems[0].hint
    conf = get_settings()
    for name in registry.queue_names():
        transport_class(conf.queue(name).transport)
    topics.wanted()
    count = len(registry.queue_names())
    told = ngettext(
        "service %(service)r, %(count)d queues", "service %(service)r, %(count)d queues", count
    )
    return True, told % {"service": conf.service_name, "count": count}, ""


def _database(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    # Half of the time: a database that does not answer must not hide what is known of the rest.
    return answer_within(timeout / 2, _look_at_database)


def _look_at_database() -> tuple[bool, str, str]:
    connection = connections[jobs_database()]
    connection.ensure_connection()
    # Only here: a worker that starts needs nothing of it.
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "kjo_django"]
    pending = executor.migration_plan(targets)
    name = f"{connection.display_name} {connection.alias!r}"
    if pending:
        told = ngettext(
            "%(database)s: %(count)d migrations are not applied",
            "%(database)s: %(count)d migrations are not applied",
            len(pending),
        )
        detail = told % {"database": name, "count": len(pending)}
        return False, detail, how_to_migrate(connection.alias)
    return True, _("%s, migrations applied") % name, ""


def how_to_migrate(alias: str) -> str:
    """Return the command that migrates this database."""
    where = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
    return _("Run manage.py migrate%s.") % where


def missing_tables(timeout: float = 2.0) -> str:
    """Return the command that creates this app's tables if they are missing; "" if they are there
    or the database does not answer in time."""
    alias = jobs_database()
    try:
        tables = answer_within(timeout, lambda: connections[alias].introspection.table_names())
    except Exception:
        return ""
    return "" if Job._meta.db_table in tables else how_to_migrate(alias)


def _coordination(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    return True, get_coordination().probe(timeout / 2), ""


def _transports(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    aliases = list(get_settings().transports)
    # Half of the time that is left: servers that are away must not delay the other checks.
    share = timeout / 2 / max(1, len(aliases))
    found, silent = [], []
    for alias in aliases:
        try:
            found.append(f"{alias}: {get_transport(alias).probe(share)}")
        except (KjoError, ImproperlyConfigured) as error:
            if not is_timeout(error):
                return False, f"{alias}: {error}", ""
            silent.append(f"{alias}: {error}")
    return not silent, "; ".join(silent or found), SILENCE if silent else ""


def _topics(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    reports = topics.plan()
    wrong = [
        f"{report.name} {', '.join(report.differences)}" for report in reports if not report.is_ok
    ]
    if wrong:
        by_hand = all(report.action == "by hand" for report in reports if not report.is_ok)
        fix = _("Change the topics or topic_options.") if by_hand else ""
        return False, "; ".join(wrong), fix
    return True, _("%d as configured") % len(reports), ""


def _relay(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    found = status.relay()
    age = found["oldest_seconds"] or 0.0
    if not found["is_needed"]:
        return True, _("not needed: messages are written with their jobs"), ""
    told = ngettext(
        "%(count)d due jobs wait, the oldest for %(age)s s",
        "%(count)d due jobs wait, the oldest for %(age)s s",
        found["backlog"],
    )
    detail = told % {"count": found["backlog"], "age": decimal(age, 0)}
    return age <= thresholds.relay_age.total_seconds(), detail, ""


def _workers(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    alive = [worker for worker in status.workers() if worker["is_alive"]]
    served = {queue for worker in alive for queue in worker["queues"]}
    serves_all = any(not worker["queues"] for worker in alive)
    wanted = filter(current_runtime().holds, registry.consumed_queue_names())
    missing = [] if serves_all else sorted(set(wanted) - served)
    if missing:
        facts = {"count": len(alive), "queues": ", ".join(missing)}
        return False, _("%(count)d alive; none for %(queues)s") % facts, ""
    return bool(alive), _("%d alive") % len(alive), ""


def _clocks(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    ahead = CLOCK.compare(current_runtime().store.server_time).ahead
    if ahead is None:
        return False, _("the database took too long to tell its time"), ASK_AGAIN
    found = {_("this host"): ahead}
    for worker in status.workers():
        if worker["is_alive"]:
            found[_("the host of %s") % worker["name"]] = worker["clock_ahead_seconds"]
    limit = thresholds.clock.total_seconds()
    fast = _("that of %(host)s is %(seconds)s s ahead")
    slow = _("that of %(host)s is %(seconds)s s behind")
    wrong = [
        (fast if seconds > 0 else slow) % {"host": name, "seconds": decimal(abs(seconds), 1)}
        for name, seconds in found.items()
        if abs(seconds) > limit
    ]
    if wrong:
        return False, _("not as the database's: %s") % ", ".join(wrong), ""
    most = max(map(abs, found.values()))
    return True, _("at most %s s from the database's") % decimal(most, 1), ""


def _handlers(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    """Tell of jobs whose handler a worker has not known. While a release is deployed there are
    some: that is a warning at first."""
    waiting = status.unknown_handlers()
    if not waiting:
        return True, _("no job waits for a worker that knows its handler"), ""
    told = (
        ngettext("%(handler)r (%(count)d jobs)", "%(handler)r (%(count)d jobs)", count)
        % {"handler": name, "count": count}
        for name, (count, _since) in sorted(waiting.items())
    )
    first = min(since for _count, since in waiting.values())
    waited = (CLOCK.now() - first).total_seconds()
    text = _("not known to a worker: %(handlers)s, the first for %(seconds)s s")
    detail = text % {"handlers": ", ".join(told), "seconds": decimal(waited, 0)}
    fix = _(
        "Replace workers of an earlier release; see that each worker imports the module that "
        "declares the handler. After KJO['UNKNOWN_HANDLER_WAIT'] such jobs are dead letters."
    )
    return waited <= thresholds.idle.total_seconds(), detail, fix


def _lag(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    queues = overview()
    status.add_lags(queues)
    errors = [f"{row['queue']}: {row['lag_error']}" for row in queues if row["lag_error"]]
    if errors:
        return False, "; ".join(errors), _("See the transports.")
    behind = [row for row in queues if row["lag"] > thresholds.lag]
    if behind:
        told = ", ".join(f"{row['queue']} {row['lag']}" for row in behind)
        return (
            False,
            _("over %(limit)d: %(queues)s") % {"limit": thresholds.lag, "queues": told},
            "",
        )
    most = max((row["lag"] for row in queues), default=0)
    return True, ngettext("at most %d messages", "at most %d messages", most) % most, ""


def _failures(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    done, failed = _recent(thresholds.idle)
    if done + failed < LEAST_EXECUTIONS:
        few = _("%(failed)d of %(count)d jobs lately, too few to judge")
        return True, few % {"failed": failed, "count": done + failed}, ""
    rate, span = failed / (done + failed), thresholds.idle.total_seconds()
    text = _("%(share)s of %(count)d jobs of the last %(seconds)g s failed")
    detail = text % {"share": f"{decimal(100 * rate, 1)}%", "count": done + failed, "seconds": span}
    return rate <= thresholds.failure_rate, detail, ""


def _progress(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    paused = paused_queues()
    now = CLOCK.now()
    limit = ago(now, thresholds.idle)
    late = sorted(
        queue
        for queue, (_count, since) in status.due(now).items()
        if since < limit and queue not in paused
    )
    if not late:
        return True, _("no due work waits long"), ""
    if sum(_recent(thresholds.idle)):
        return True, _("busy; work waits in %s") % ", ".join(late), ""
    text = _("nothing was processed for %(seconds)g s; work waits in %(queues)s")
    facts = {"seconds": thresholds.idle.total_seconds(), "queues": ", ".join(late)}
    return False, text % facts, ""


def _lanes(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    """Tell of workers that hold what they cannot start, and of those whose threads have died."""
    now = CLOCK.now()
    limit = ago(now, thresholds.idle)
    wrong = []
    for worker in status.workers(now):
        waits = [each for each in worker["partitions"] if each["waiting_since"] is not None]
        oldest = min(waits, key=lambda each: each["waiting_since"], default=None)
        since = None if oldest is None else datetime.fromisoformat(oldest["waiting_since"])
        if oldest is None or since is None or since > limit or not worker["is_alive"]:
            continue
        told = _("%(worker)s has kept what it fetched from %(place)s for %(seconds)s s")
        place = f"{oldest['topic']}/{oldest['partition']}"
        seconds = decimal((now - since).total_seconds(), 0)
        wrong.append(told % {"worker": worker["name"], "place": place, "seconds": seconds})
    ended = Worker.objects.using(jobs_database()).filter(
        state=Worker.State.STOPPED, heartbeat_at__gte=limit, last_error__startswith=THREADS_DIED
    )
    for name, error in ended.values_list("name", "last_error")[:LISTED]:
        wrong.append(_("%(worker)s has ended: %(error)s") % {"worker": name, "error": error})
    if wrong:
        return False, "; ".join(wrong), ""
    return True, _("no fetched record waits long for a lane"), ""


def _rescues(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    """Tell of jobs that are published again and again: each time their message is gone, and they
    have not run."""
    again = status.published_anew(CLOCK.now())
    if not again:
        return True, _("no job is published again and again"), ""
    told = (
        _("%(count)d of %(queue)s, as %(job)s") % {"count": count, "queue": queue, "job": job}
        for queue, (count, job) in sorted(again.items())
    )
    return False, _("published long after they were due, and not run: %s") % ", ".join(told), ""


def _scaling(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    """Warn of more workers than partitions: each partition has one reader, so some stand by."""
    conf = get_settings()
    alive = [worker for worker in status.workers() if worker["is_alive"]]
    idle = []
    for name in filter(current_runtime().holds, registry.consumed_queue_names()):
        queue = conf.queue(name)
        if not shares_by_partition(queue):
            continue
        count = sum(not worker["queues"] or name in worker["queues"] for worker in alive)
        described = get_transport(queue.transport).describe_topics(queue.topics)
        partitions = [topic.partitions for topic in described if topic.partitions is not None]
        if partitions and count > max(partitions):
            told = _("%(queue)s has %(workers)d workers for %(partitions)d partitions")
            facts = {"queue": name, "workers": count, "partitions": max(partitions)}
            idle.append(told % facts)
    if not idle:
        return True, _("every worker has a partition"), ""
    fix = _("Raise topic_options['partitions'] to twice the workers, or stop some.")
    return True, _("some workers have no partition: %s") % "; ".join(idle), fix


def _schedules(thresholds: Thresholds, timeout: float) -> tuple[bool, str, str]:
    late = schedules_shown.late()
    if not late:
        return True, _("none is late"), ""
    shown = "; ".join(f"{row.name} ({row.problem})" if row.problem else row.name for row in late)
    fix = _("Install the jobs they name, or edit or pause them.") if late[0].problem else ""
    return False, _("due for a minute or longer: %s") % shown, fix


def shares_by_partition(queue: QueueConf) -> bool:
    """Whether each partition of the queue's topic is read by one worker at a time.

    Any number of workers share the records of the database and of Redis Streams.
    """
    capabilities = transport_class(queue.transport).capabilities
    return capabilities.ordering and capabilities.replay


def _recent(window: timedelta) -> tuple[int, int]:
    """Return how many jobs completed and failed in the last ``window``."""
    rows = MetricBucket.objects.using(jobs_database()).filter(minute__gte=ago(CLOCK.now(), window))
    sums = rows.aggregate(done=Sum("completed_count"), failed=Sum("failed_count"))
    return sums["done"] or 0, sums["failed"] or 0


_STORED = (SETTINGS, DATABASE)
PROBES = (
    _Probe(SETTINGS, _settings, gettext_noop("Correct the KJO setting; see manage.py check."), ()),
    _Probe(
        DATABASE,
        _database,
        gettext_noop("Start the database, or correct DATABASES."),
        (SETTINGS,),
        asks_servers=True,
    ),
    _Probe(
        COORDINATION,
        _coordination,
        gettext_noop("Start it, or correct KJO['COORDINATION']."),
        asks_servers=True,
    ),
    _Probe(
        TRANSPORTS,
        _transports,
        gettext_noop("Start it, or correct KJO['TRANSPORTS']."),
        asks_servers=True,
    ),
    _Probe(
        TOPICS, _topics, gettext_noop("Run manage.py kjo_topics create."), (SETTINGS, TRANSPORTS)
    ),
    _Probe(
        RELAY,
        _relay,
        gettext_noop("Start manage.py kjo_produce, or kjo_consume without --no-relay."),
        _STORED,
    ),
    _Probe(WORKERS, _workers, gettext_noop("Start manage.py kjo_consume."), _STORED),
    _Probe(
        CLOCKS,
        _clocks,
        gettext_noop(
            "Let NTP keep the clocks of these hosts. Workers go by the database's meanwhile; what "
            "web processes delay is due too early or too late, as is a run_at that a handler takes "
            "from its host."
        ),
        _STORED,
    ),
    _Probe(HANDLERS, _handlers, "", _STORED),
    _Probe(
        LAG,
        _lag,
        gettext_noop("Start more workers, or raise CONCURRENCY."),
        (*_STORED, TRANSPORTS),
    ),
    _Probe(FAILURES, _failures, gettext_noop("Look at the open dead letters."), _STORED),
    _Probe(
        PROGRESS, _progress, gettext_noop("Start manage.py kjo_consume, or restart it."), _STORED
    ),
    _Probe(
        LANES,
        _lanes,
        gettext_noop(
            "Give long jobs a queue and workers of their own, or raise CONCURRENCY. Why a thread "
            "has died is in the log of its worker."
        ),
        _STORED,
    ),
    _Probe(
        RESCUES,
        _rescues,
        gettext_noop(
            "Look what workers log of such a job. Their messages are lost (retention, deleted "
            "topics, offsets set by hand), or workers drop them."
        ),
        _STORED,
    ),
    _Probe(SCALING, _scaling, gettext_noop("See the transports."), (*_STORED, TRANSPORTS)),
    _Probe(
        SCHEDULES,
        _schedules,
        gettext_noop("Start kjo_consume without --no-schedules, or kjo_schedule."),
        _STORED,
    ),
)


# --- The checks of a deployment -------------------------------------------------------------------

PROBE_TIMEOUT = 5.0
"""Seconds for each server."""
IDS = {
    TRANSPORTS: "kjo.W008",
    COORDINATION: "kjo.W009",
    TOPICS: "kjo.W010",
}


def deploy_checks() -> Iterator[django_checks.CheckMessage]:
    """Yield the faults of the transports, their topics, coordination and the database."""
    found = health(PROBE_TIMEOUT * len(IDS), only={SETTINGS, *IDS})
    for check in found:
        if check.ok is False and check.name in IDS:
            text = f"{check.name.capitalize()}: {check.detail}"
            yield django_checks.Warning(text, hint=check.fix, id=IDS[check.name])
    yield from _pooler(current_runtime())


def _pooler(runtime: Runtime) -> Iterator[django_checks.CheckMessage]:
    """Yield the missing settings that a pooler in transaction mode before the database needs."""
    alias = runtime.database
    if not runtime.store.has_notify:
        return
    from kjo_django.store import postgres

    def lends_sessions() -> bool:
        connect = functools.partial(postgres.plain_connection, alias)
        with connect() as connection:
            return postgres.lends_sessions(connection, connect)

    try:
        is_lent = answer_within(PROBE_TIMEOUT, lends_sessions)
    except Exception:
        return  # The checks of the transports and of coordination report what is out of reach.
    if not is_lent:
        return
    settings = connections[alias].settings_dict
    missing = {}
    if not settings["OPTIONS"].get("application_name"):
        key = "['OPTIONS']['application_name']"
        missing[key] = "nobody can end the transactions of a frozen worker"
    if not settings.get("DISABLE_SERVER_SIDE_CURSORS"):
        key = "['DISABLE_SERVER_SIDE_CURSORS'] = True"
        missing[key] = "iterator() fails outside transactions"
    for key, consequence in missing.items():
        yield django_checks.Warning(
            f"The database {alias!r} is reached through a pooler in transaction mode: "
            f"{consequence}.",
            hint=f"Set DATABASES[{alias!r}]{key}. docs/how-to/production.md tells why.",
            id="kjo.W013",
        )
    from kjo_django.coordination.database.postgres_listener import SessionLentError

    try:
        runtime.coordination.listen(["kjo-check"]).close()
    except SessionLentError as error:
        yield django_checks.Warning(f"Coordination: {error}.", id="kjo.W013")
    except (CoordinationError, ImproperlyConfigured):
        pass  # The check of coordination has reported it.
