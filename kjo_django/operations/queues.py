"""Pausing and resuming queues. Running workers obey within two seconds, and a pause survives
rebalances and restarts: it is a row."""

from __future__ import annotations

import functools
from typing import Any

from django.db import transaction
from django.utils import timezone

from kjo_django import registry, signals
from kjo_django.conf import get_settings
from kjo_django.models import QueueControl
from kjo_django.operations.rows import tell_after_commit
from kjo_django.producer.dispatch import jobs_database


def pause(queue: str, *, actor: str = "") -> bool:
    """Stop handing out jobs of a queue; what runs now ends normally. False: it was paused."""
    return _set_paused(queue, True, actor)


def resume(queue: str, *, actor: str = "") -> bool:
    """Undo ``pause``. False: the queue was not paused."""
    return _set_paused(queue, False, actor)


def paused_queues() -> set[str]:
    """Return the names of the queues paused now."""
    rows = QueueControl.objects.using(jobs_database()).filter(is_paused=True)
    return set(rows.values_list("queue", flat=True))


def ensure_rows() -> None:
    """Make a row for every known queue that has none; it says what no row says: as configured."""
    using = jobs_database()
    rows = QueueControl.objects.using(using)
    missing = set(registry.queue_names()) - set(rows.values_list("queue", flat=True))
    if missing:
        rows.bulk_create([QueueControl(queue=name) for name in missing], ignore_conflicts=True)


def overview() -> list[dict[str, Any]]:
    """Return every known queue: where it goes and what an operator asked of it."""
    controls = {control.queue: control for control in _controls()}
    conf = get_settings()
    return [
        {
            "queue": name,
            "topic": (queue := conf.queue(name)).topic,
            "transport": queue.transport,
            "consumer_group": queue.consumer_group,
            "dead_letter_topic": queue.dead_letter_topic,
            "concurrency": (control and control.concurrency) or queue.concurrency,
            "is_paused": bool(control and control.is_paused),
            "changed_by": control.changed_by if control else "",
        }
        for name in sorted({*registry.queue_names(), *controls})
        for control in [controls.get(name)]
    ]


def _controls() -> list[QueueControl]:
    return list(QueueControl.objects.using(jobs_database()).all())


def _set_paused(queue: str, is_paused: bool, actor: str) -> bool:
    if not queue or len(queue) > 100:
        raise ValueError(f"No queue has the name {queue!r:.120}")
    using = jobs_database()
    rows = QueueControl.objects.using(using)
    with transaction.atomic(using=using):
        # A write first, and a conditional one: of two operators one changes the queue.
        rows.bulk_create([QueueControl(queue=queue)], ignore_conflicts=True)
        changed = rows.filter(queue=queue, is_paused=not is_paused).update(
            is_paused=is_paused, changed_by=actor[:150], updated_at=timezone.now()
        )
        if changed:
            signal = signals.queue_paused if is_paused else signals.queue_resumed
            told = functools.partial(signals.send, signal, sender=queue, queue=queue, actor=actor)
            tell_after_commit(using, told)
    return bool(changed)
