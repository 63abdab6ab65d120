"""Pausing and resuming queues, and their limits.

They are in rows, so they survive rebalances and restarts. Running workers obey within two seconds.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.dispatch import Signal
from django.utils.translation import gettext_noop as _

from kjo_django import registry, signals
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.models import QueueControl
from kjo_django.operations.rows import Observer, on_commit
from kjo_django.refusals import RefusedError
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.values import refuse_unknown

LIMITS = {
    "concurrency": ("", 1000),
    "max_attempts": ("", 1000),
    "backoff_base": (" of seconds", 86_400),
}
"""The unit and the maximum of each limit of a queue."""


def pause(queue: str, *, actor: str = "", on_changed: Observer | None = None) -> bool:
    """Pause a queue: running jobs end normally. Return False if it was paused already."""
    return _change(queue, {"is_paused": True}, actor, signals.queue_paused, on_changed)


def resume(queue: str, *, actor: str = "", on_changed: Observer | None = None) -> bool:
    """Undo ``pause``. Return False if the queue was not paused."""
    return _change(queue, {"is_paused": False}, actor, signals.queue_resumed, on_changed)


def set_policy(
    queue: str,
    *,
    actor: str = "",
    on_changed: Observer | None = None,
    **limits: timedelta | int | None,
) -> bool:
    """Change limits of a queue for all its jobs; return False if nothing changed.

    A limit that is not given stays. With None the configured limit holds again. Running workers
    obey within two seconds.

    :param on_changed: called with the row inside the transaction.
    :param limits: ``concurrency``: groups of the queue that one worker runs at once, 1 to 1,000.
        ``max_attempts``: executions before a job is dead-lettered, 1 to 1,000, in place of the
        number that each job was enqueued with. A job that waits for a later attempt still gets it.
        ``backoff_base``: the delay before the second attempt, which doubles each time, 1 second to
        a day, in whole seconds. Handlers with a back-off of their own keep it.
    :raises ValueError: a value is out of its range, or no queue can have this name.
    """
    refuse_unknown(limits, LIMITS, "set_policy")
    changes = {name: _checked(name, value) for name, value in limits.items()}
    return bool(changes) and _change(
        queue, changes, actor, signals.queue_changed, on_changed, changes=changes
    )


def paused_queues() -> set[str]:
    """Return the names of the paused queues."""
    rows = QueueControl.objects.using(jobs_database()).filter(is_paused=True)
    return set(rows.values_list("queue", flat=True))


def queues_here() -> list[str]:
    """Return the known queues whose jobs are in the database that is worked with."""
    return list(filter(current_runtime().holds, registry.queue_names()))


def untouched() -> list[QueueControl]:
    """Return an unsaved row for every known queue without a row; it sets no limit."""
    rows = QueueControl.objects.using(jobs_database())
    missing = set(queues_here()) - set(rows.values_list("queue", flat=True))
    return [QueueControl(queue=name) for name in sorted(missing)]


def ensure_rows() -> None:
    """Store a row for every known queue without one."""
    missing = untouched()
    if missing:
        current_runtime().store.insert_missing(missing)


def overview() -> list[dict[str, Any]]:
    """Return every known queue with its topic, its settings and the limits that operators set."""
    rows = QueueControl.objects.using(jobs_database())
    controls = {control.queue: control for control in rows}
    conf = get_settings()
    return [
        {
            "queue": name,
            "topic": (queue := conf.queue(name)).topic,
            "topics": queue.topics,
            "transport": queue.transport,
            "consumer_group": queue.consumer_group,
            "dead_letter_topic": queue.dead_letter_topic,
            "concurrency": (control and control.concurrency) or queue.concurrency,
            "max_attempts": (control and control.max_attempts) or queue.max_attempts,
            "backoff_base_seconds": (control and control.backoff_base)
            or conf.backoff_base.total_seconds(),
            "asked": {limit: getattr(control, limit, None) for limit in LIMITS},
            "is_paused": bool(control and control.is_paused),
            "changed_by": control.changed_by if control else "",
        }
        for name in sorted({*queues_here(), *controls})
        for control in [controls.get(name)]
    ]


def _checked(name: str, value: Any) -> int | None:
    unit, most = LIMITS[name]
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        value = int(seconds) if seconds.is_integer() and name == "backoff_base" else None
    elif value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        text = _("%(name)s must be a whole number from 1 to %(most)s, or None")
        if unit:
            text = _("%(name)s must be a whole number of seconds from 1 to %(most)s, or None")
        raise RefusedError(text, name=name, most=most)
    return value


def _change(
    queue: str,
    values: dict[str, Any],
    actor: str,
    signal: Signal,
    on_changed: Observer | None = None,
    **facts: Any,
) -> bool:
    if not queue or len(queue) > 100:
        raise RefusedError(_("No queue has the name %(name).120r"), name=queue)
    using = jobs_database()
    rows = QueueControl.objects.using(using)
    with transaction.atomic(using=using):
        # The UPDATE is conditional: of two operators one changes the queue.
        current_runtime().store.insert_missing([QueueControl(queue=queue)])
        changed = (
            rows.filter(queue=queue)
            .exclude(**values)
            .update(**values, changed_by=actor[:150], updated_at=CLOCK.now())
        )
        if changed:
            if on_changed is not None:
                on_changed([rows.get(queue=queue)])
            announce = functools.partial(
                signal.send_robust, sender=queue, queue=queue, actor=actor, **facts
            )
            on_commit(using, announce)
    return bool(changed)
