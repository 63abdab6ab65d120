"""What the parts of a process share: settings, database, store, clock, coordination and transports.

A worker makes its ``Runtime`` once and passes it down, so nothing on a job's way reads settings or
looks for a backend again. Web code asks for ``current_runtime()`` once per call. Backends are made
on first use, one of each per process: a forked child makes its own, since connections do not
survive a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import router
from django.utils.module_loading import import_string

from kjo_django.clock import CLOCK, Clock
from kjo_django.conf import DEFAULT_COORDINATION, Settings, declared_queues, get_settings
from kjo_django.coordination.base import CircuitBreaker, Coordination
from kjo_django.models import Job, LimitControl, QueueControl
from kjo_django.store import Store, store_for
from kjo_django.transports.base import Transport
from kjo_django.values import unknown_key


@dataclass(frozen=True, slots=True)
class Runtime:
    """What one process runs with.

    :param settings: those in force when it was made.
    :param database: the alias of the database that holds the jobs.
    :param store: the statements for that database.
    :param coordination: leases, marks and wake-ups.
    :param service: the name of this service, which its markers bear.
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
    clock: Clock = CLOCK
    wake_breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    queue_controls: dict[str, QueueControl] = field(default_factory=dict)
    limit_controls: dict[str, LimitControl] = field(default_factory=dict)


_lock = threading.RLock()
_runtime: Runtime | None = None
_transports: dict[str, Transport] = {}
_classes: dict[str, type[Transport]] = {}
_coordination: list[Coordination] = []
_of_parents: list[Any] = []
"""Backends of the process this one was forked from. They are kept, not closed: their destructors
would end connections that the parent still uses."""


def current_runtime() -> Runtime:
    """Return the runtime of this process for the settings in force.

    :raises ImproperlyConfigured: a setting is wrong.
    """
    global _runtime
    made = _runtime
    settings = get_settings() if made is None else made.settings
    alias = settings.database or router.db_for_write(Job)
    if made is None or made.database != alias:
        made = Runtime(settings, alias, store_for(alias), get_coordination(), settings.service_name)
        _runtime = made
    return made


def jobs_database() -> str:
    """Return the alias of the database that holds the jobs."""
    return current_runtime().database


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
                if conf.database:
                    options.setdefault("DATABASE", conf.database)
            _transports[alias] = found(alias, options)
        return _transports[alias]


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
    """Return the coordination of this process."""
    with _lock:
        if not _coordination:
            conf = get_settings()
            declared = conf.coordination or {"BACKEND": DEFAULT_COORDINATION}
            found = _import(declared, "KJO['COORDINATION']", Coordination)
            _coordination.append(found(dict(declared.get("OPTIONS", {}))))
        return _coordination[0]


def close_backends() -> None:
    """Close and forget every backend; the next use makes new ones."""
    global _runtime
    with _lock:
        backends: list[Any] = [*_transports.values(), *_coordination]
        for backend in backends:
            backend.close()
        _transports.clear()
        _coordination.clear()
        _runtime = None


def _forget_the_parents() -> None:
    """In the child of a fork, forget the parent's backends without closing them."""
    global _lock, _runtime
    _of_parents.extend([*_transports.values(), *_coordination])
    _transports.clear()
    _coordination.clear()
    _lock, _runtime = threading.RLock(), None


os.register_at_fork(after_in_child=_forget_the_parents)


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting in {"KJO", "CACHES", "DATABASES"}:
        _classes.clear()
        close_backends()


setting_changed.connect(_reset, dispatch_uid="kjo_django.runtime")
