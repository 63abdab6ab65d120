"""Consumers: groups, their partitions and lag, the workers, and quieting and stopping these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.dashboard.desk import Desk, Screen, shared
from kjo_django.models import Worker
from kjo_django.operations import workers
from kjo_django.operations.counting import seconds_since
from kjo_django.operations.queues import overview
from kjo_django.operations.status import add_lags, alive_within
from kjo_django.producer.dispatch import jobs_database

SHOWN = 200
LAG_SECONDS = 5.0


def show(desk: Desk) -> HttpResponse:
    """Return groups and workers."""
    queues = shared("lags", _lags, LAG_SECONDS)
    rows = _workers()
    return desk.show(
        "consumers.html",
        {
            "groups": _groups(queues, rows),
            "workers": rows,
            "shown": SHOWN,
            "summary": _("%d workers are alive") % sum(row["is_alive"] for row in rows),
        },
        title=_("Consumers"),
    )


def _lags() -> list[dict[str, Any]]:
    rows = overview()
    add_lags(rows)
    return rows


def _workers() -> list[dict[str, Any]]:
    now = timezone.now()
    within = alive_within()
    rows = Worker.objects.using(jobs_database()).exclude(state=Worker.State.STOPPED)
    found = [
        {
            "worker": worker,
            "is_alive": worker.heartbeat_at >= now - within,
            "age": seconds_since(worker.heartbeat_at, now),
            "uptime": seconds_since(worker.started_at, worker.heartbeat_at),
        }
        for worker in rows.order_by("-heartbeat_at")[:SHOWN]
    ]
    return sorted(found, key=lambda row: (not row["is_alive"], row["worker"].name))


def _groups(queues: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    owners = {
        (topic, str(partition)): row["worker"].name
        for row in reversed(rows)
        if row["is_alive"]
        for topic, partition in row["worker"].partitions
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for queue in queues:
        held = {
            partition: name
            for (topic, partition), name in owners.items()
            if topic == queue["topic"]
        }
        lags = queue["lag_by_partition"]
        groups.setdefault(queue["consumer_group"], []).append(
            {
                **queue,
                "partitions": [
                    {"number": number, "lag": lags.get(number), "owner": held.get(number)}
                    for number in sorted({*lags, *held}, key=int)
                ],
            }
        )
    return [
        {"name": name, "queues": members, "lag": sum(each["lag"] or 0 for each in members)}
        for name, members in sorted(groups.items())
    ]


def _ask(act: Callable[..., Any], word: str, done: Any, desk: Desk, worker: UUID) -> HttpResponse:
    if not Worker.objects.using(jobs_database()).filter(pk=worker).exists():
        raise Http404(_("There is no such worker."))

    def change() -> None:
        outcomes = act([worker], actor=desk.actor, on_changed=desk.audit(word))
        if outcomes.changed_count:
            desk.tell(done)
        else:
            desk.tell(_("The worker has ended, or was asked for that already."), messages.WARNING)

    desk.attempt(change)
    return desk.back("consumers")


def _action(name: str, act: Callable[..., Any], word: str, done: Any) -> Screen:
    path = f"consumers/<uuid:worker>/{name}/"
    view = partial(_ask, act, word, done)
    return Screen(f"worker_{name}", path, view, "control_worker", is_action=True)


SCREENS = (
    Screen("consumers", "consumers/", show, title=gettext_lazy("Consumers")),
    _action(
        "quiet",
        workers.quiet,
        "Quieted.",
        gettext_lazy("The worker starts nothing more; what runs there ends."),
    ),
    _action("unquiet", workers.unquiet, "Unquieted.", gettext_lazy("The worker goes on.")),
    _action("stop", workers.stop, "Asked to stop.", gettext_lazy("The worker is stopping.")),
)
