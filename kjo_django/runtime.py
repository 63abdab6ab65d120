"""What the parts of a process share: settings, database, store, clock, coordination and transports.

A worker makes its ``Runtime`` once and passes it down, so nothing on a job's way reads settings or
looks for a backend again. Web code asks for ``current_runtime()`` once per call. Backends are made
on first use, one of each per process: a forked child makes its own, since connections do not
survive a fork.

Queues may have databases of their own. Each database has a ``Runtime``, and ``use_database`` says
which one a thread or a request works with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import router
from django.utils.module_loading import import_string

from kjo_django.clock import CLOCK, Clock
from kjo_django.conf import (
    DEFAULT_COORDINATION,
    Settings,
    databases_on,
    declared_queues,
    get_settings,
)
from kjo_django.coordination.base import CircuitBreaker, Coordination
from kjo_django.models import Job, LimitControl, QueueControl
from kjo_django.round_trips import GroupBudget
from kjo_django.store import Store, store_for
from kjo_django.transports.base import Transport
from kjo_django.values import unknown_key


@dataclass(frozen=True, slots=True)
class Runtime:
    """What one process runs with, for the queues of one database.

    :param settings: those in force when it was made.
    :param database: the alias of the database that holds the jobs.
    :param store: the statements for that database.
    :param coordination: leases, marks and wake-ups.
    :param service: the name of this service, which its markers bear.
    :param group_budget: how long jobs that share a transaction may run.
    :param clock: the system's, or a test's.
    :param wake_breaker: keeps wake-ups from waiting for a coordination that does not answer.
    :param queue_controls: what operators asked of queues, by their names. A worker reads the rows
        now and then, so that no job costs a query.
    :param limit_controls: what operators asked of limits, likewise.
    """

    settings: Settings
    database: str
    store: Store
    coordination: Coordination
    service: str
    group_budget: GroupBudget
    clock: Clock = CLOCK
    wake_breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    queue_controls: dict[str, QueueControl] = field(default_factory=dict)
    limit_controls: dict[str, LimitControl] = field(default_factory=dict)

    lease_suffix: str = ""
    """Ends the names of leases of which each database has one; empty for the default database."""

    def holds(self, queue: str) -> bool:
        """Return whether the jobs of a queue are in this database."""
        return (self.settings.queue(queue).database or default_database()) == self.database


_chosen: ContextVar[str | None] = ContextVar("kjo_django_database", default=None)
"""The alias of the database that this thread or request works with; None: the default one."""
_lock = threading.RLock()
_runtimes: dict[str, Runtime] = {}
_transports: dict[str, Transport] = {}
_classes: dict[str, type[Transport]] = {}
_coordinations: dict[str, Coordination] = {}
"""By database; that of "" serves all databases."""
_of_parents: list[Any] = []
"""Backends of the process this one was forked from. They are kept, not closed: their destructors
would end connections that the parent still uses."""


def current_runtime() -> Runtime:
    """Return the runtime of the database that this thread or request works with, for the settings
    in force.

    :raises ImproperlyConfigured: a setting is wrong.
    """
    alias = _chosen.get()
    if alias is None:
        made = next(iter(_runtimes.values()), None)
        settings = get_settings() if made is None else made.settings
        alias = settings.database or router.db_for_write(Job)
    return _runtimes.get(alias) or runtime_for(alias)


def runtime_for(database: str) -> Runtime:
    """Return the runtime of a database, by its alias."""
    made = _runtimes.get(database)
    if made is None:
        settings, store = get_settings(), store_for(database)
        coordination = _coordination_of(database)
        suffix = "" if database == default_database() else f"@{database}"
        service = settings.service_name
        budget = GroupBudget(settings.group_budget.total_seconds())
        made = Runtime(
            settings, database, store, coordination, service, budget, lease_suffix=suffix
        )
        _runtimes[database] = made
    return made


def runtime_of(queue: str) -> Runtime:
    """Return the runtime of the database that holds a queue's jobs."""
    here = current_runtime()
    alias = here.settings.queue(queue).database
    if alias is None and _chosen.get() is not None:
        alias = default_database()
    return here if alias in (None, here.database) else runtime_for(alias)


def jobs_database() -> str:
    """Return the alias of the database with the jobs that this thread or request works with."""
    return current_runtime().database


def default_database() -> str:
    """Return the alias of the database of every queue that has none of its own."""
    return get_settings().database or router.db_for_write(Job)


def database_of(queue: str) -> str:
    """Return the alias of the database that holds a queue's jobs."""
    return get_settings().queue(queue).database or default_database()


def databases() -> list[str]:
    """Return the aliases of all databases that hold jobs, the default one first."""
    settings = get_settings()
    own = {settings.queue(name).database for name in {*settings.queues, *declared_queues()}}
    first = default_database()
    return [first, *sorted(alias for alias in own if alias not in (None, first))]


def refuse_elsewhere(queue: str) -> None:
    """Check that the jobs of a declared queue are in the database that this thread works with.

    :raises ValueError: they are in another one.
    """
    here, alias = current_runtime().database, database_of(queue)
    if alias != here and queue in {*get_settings().queues, *declared_queues()}:
        raise ValueError(f"The jobs of {queue!r} are in {alias!r}, not in {here!r}.")


class UnknownDatabaseError(ImproperlyConfigured):
    """The alias is not that of a database with jobs."""


def set_database(database: str) -> None:
    """Let this thread work with a database from now on."""
    _chosen.set(database)


@contextmanager
def use_database(database: str) -> Iterator[Runtime]:
    """Let this thread or request work with a database within the block.

    :raises UnknownDatabaseError: no queue has its jobs there.
    """
    if database not in _runtimes and database not in (known := databases()):
        raise UnknownDatabaseError(
            f"The database {database!r} holds no jobs. Those that do: {', '.join(known)}; "
            "KJO['QUEUES'][…]['database'] adds one."
        )
    token = _chosen.set(database)
    try:
        yield current_runtime()
    finally:
        _chosen.reset(token)


def transport_class(alias: str) -> type[Transport]:
    """Return the class of a transport without making one."""
    if alias not in _classes:
        declared = get_settings().transports
        if alias not in declared:
            raise ImproperlyConfigured(
                f"KJO['TRANSPORTS'] has no {alias!r}. Declared: {', '.join(declared) or 'none'}."
            )
        _classes[alias] = _import(declared[alias], f"KJO['TRANSPORTS'][{alias!r}]", Transport)
    return _classes[alias]


def _import(declared: Any, where: str, kind: type[Any]) -> Any:
    path = declared.get("BACKEND") if isinstance(declared, dict) else None
    if not isinstance(path, str):
        raise ImproperlyConfigured(f"{where} must be a dict with a 'BACKEND' import path.")
    if fault := unknown_key(declared, ("BACKEND", "OPTIONS"), where):
        raise ImproperlyConfigured(fault)
    if not isinstance(declared.get("OPTIONS", {}), Mapping):
        raise ImproperlyConfigured(f"{where}['OPTIONS'] must be a dict.")
    try:
        found = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f"{where}['BACKEND'] cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ImproperlyConfigured(f"{where}['BACKEND'] is not a {kind.__name__}: {path}")
    missing = set(getattr(found, "__abstractmethods__", ()))
    if kind is Transport and not hasattr(found, "capabilities"):
        missing.add("capabilities")
    if missing:
        raise ImproperlyConfigured(
            f"{where}['BACKEND'] is an incomplete {kind.__name__}: "
            f"{path} lacks {', '.join(sorted(missing))}."
        )
    return found


def get_transport(alias: str = "default") -> Transport:
    """Return the transport of this alias, the same one for the whole process."""
    made = _transports.get(alias)
    if made is not None:
        return made
    with _lock:
        if alias not in _transports:
            conf = get_settings()
            found = transport_class(alias)
            options = dict(conf.transports[alias].get("OPTIONS", {}))
            if found.capabilities.transactional:
                options.setdefault("GROUPS", _declared_groups(conf, alias))
                options.setdefault("DATABASE", _database_of_queues(conf, alias))
            _transports[alias] = found(alias, options)
        return _transports[alias]


def database_of_transport(alias: str) -> str:
    """Return the database in whose transactions a transport that joins them writes its messages.

    :raises ImproperlyConfigured: see ``get_transport``.
    """
    conf = get_settings()
    options = conf.transports[alias].get("OPTIONS", {})
    return options.get("DATABASE") or _database_of_queues(conf, alias)


def _database_of_queues(conf: Settings, alias: str) -> str:
    """Return the database with the jobs of all queues on a transport that joins transactions.

    :raises ImproperlyConfigured: it would have to join those of several databases.
    """
    usual = default_database()
    on_it = {database or usual for database in databases_on(conf, alias)}
    if len(on_it) > 1:
        raise ImproperlyConfigured(
            f"Queues on KJO['TRANSPORTS'][{alias!r}] have their jobs in the databases "
            f"{' and '.join(sorted(on_it))}, and it writes each message in the transaction of its "
            "job: give the queues of each KJO['QUEUES'][…]['database'] a transport of their own."
        )
    return on_it.pop() if on_it else usual


def _declared_groups(conf: Settings, alias: str) -> dict[str, list[str]]:
    """Return the consumer groups of each topic that the settings declare."""
    groups: dict[str, dict[str, None]] = {}
    for name in dict.fromkeys([*conf.queues, *declared_queues()]):
        queue = conf.queue(name)
        # A group that never reads would leave a row of every record behind.
        if queue.consume and queue.transport == alias:
            for topic in queue.topics:
                groups.setdefault(topic, {})[queue.consumer_group] = None
    return {topic: list(names) for topic, names in groups.items()}


def get_coordination() -> Coordination:
    """Return the coordination of the database that this thread or request works with."""
    return _coordination_of(_chosen.get() or default_database())


def _coordination_of(database: str) -> Coordination:
    """Return the coordination for the jobs of a database: where it is in the database with the
    jobs, each database has one of its own."""
    with _lock:
        if (made := _coordinations.get(database) or _coordinations.get("")) is not None:
            return made
        declared = get_settings().coordination or {"BACKEND": DEFAULT_COORDINATION}
        found = _import(declared, "KJO['COORDINATION']", Coordination)
        options = dict(declared.get("OPTIONS", {}))
        is_of_database = found.is_with_jobs and "DATABASE" not in options
        if is_of_database and database != default_database():
            # A connection to listen on is to the default one.
            options = {**options, "DATABASE": database}
            options.pop("LISTEN_DATABASE", None)
        fresh: Coordination = found(options)
        _coordinations[database if is_of_database else ""] = fresh
        return fresh


def close_backends() -> None:
    """Close and forget every backend; the next use makes new ones."""
    with _lock:
        backends: list[Any] = [*_transports.values(), *_coordinations.values()]
        for backend in backends:
            backend.close()
        _transports.clear()
        _coordinations.clear()
        _runtimes.clear()


def _forget_the_parents() -> None:
    """In the child of a fork, forget the parent's backends without closing them."""
    global _lock
    _of_parents.extend([*_transports.values(), *_coordinations.values()])
    _transports.clear()
    _coordinations.clear()
    _runtimes.clear()
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_the_parents)


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting in {"KJO", "CACHES", "DATABASES"}:
        _classes.clear()
        close_backends()


setting_changed.connect(_reset, dispatch_uid="kjo_django.runtime")
