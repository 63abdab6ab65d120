"""Queues: how each does, pausing, limits and retry policy."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django import registry
from kjo_django.admin.dashboard import overview
from kjo_django.admin.dashboard.charts import sparkline
from kjo_django.admin.dashboard.desk import Desk, Screen, forget, shared
from kjo_django.admin.dashboard.figures import number
from kjo_django.models import QueueControl
from kjo_django.operations import queues
from kjo_django.operations.monitoring import metrics, status
from kjo_django.store.transactions import jobs_database

MOST_COUNTED = 20_000
"""Jobs of a state that are told apart by queue, for which their rows must be read."""
LAG_SECONDS = 5.0
"""How long a look at all queues is shared: it asks the broker."""


def show(desk: Desk) -> HttpResponse:
    """Return all queues."""
    rows, _is_capped = shared("queues", lambda: status.queue_rows(limit=MOST_COUNTED), LAG_SECONDS)
    return desk.show(
        "queues.html",
        {"rows": _rows(rows), "limit": MOST_COUNTED, "summary": _summary(rows)},
        title=_("Queues"),
    )


def _rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = shared("metrics by queue", metrics.by_queue)
    workers = shared("workers", status.workers)
    rows = []
    for row in found:
        figures = done.get(row["queue"])
        values = figures.sparkline if figures else []
        total = number(sum(values))
        summary = _("%s jobs in the last hour") % total
        working = [
            worker for worker in workers if worker["is_alive"] and row["queue"] in worker["queues"]
        ]
        rows.append(
            {
                **row,
                "figures": figures,
                "spark": sparkline(values or [0], summary),
                "worker_count": len(working),
                "slots": sum(worker["concurrency"] for worker in working),
            }
        )
    return rows


def _summary(rows: list[dict[str, Any]]) -> str:
    paused = sum(row["is_paused"] for row in rows)
    return _("%(count)d queues, %(paused)d paused") % {"count": len(rows), "paused": paused}


POLICY = ("concurrency", "max_attempts", "backoff_base")


class PolicyForm(forms.Form):
    """Limits and retry policy; an empty field means: as configured."""

    concurrency = forms.IntegerField(
        label=gettext_lazy("Concurrency"),
        min_value=1,
        max_value=queues.LIMITS["concurrency"][1],
        required=False,
        help_text=gettext_lazy("Groups of this queue one worker runs at once."),
    )
    max_attempts = forms.IntegerField(
        label=gettext_lazy("Max attempts"),
        min_value=1,
        max_value=queues.LIMITS["max_attempts"][1],
        required=False,
        help_text=gettext_lazy(
            "Executions before a job is dead-lettered, whatever the job was enqueued with."
        ),
    )
    backoff_base = forms.IntegerField(
        label=gettext_lazy("Back-off (seconds)"),
        min_value=1,
        max_value=queues.LIMITS["backoff_base"][1],
        required=False,
        help_text=gettext_lazy("Before the second attempt; doubles each time."),
    )


def show_one(desk: Desk, queue: str) -> HttpResponse:
    """Return one queue, and change its policy."""
    known = {row["queue"]: row for row in queues.overview()}
    if queue not in known:
        raise Http404(_("No queue has this name."))
    may_change = desk.may("change_queuecontrol")
    form = PolicyForm(desk.request.POST or None, initial=_policy(queue)) if may_change else None
    if desk.request.method == "POST":
        if form is None:
            raise PermissionDenied
        if form.is_valid() and desk.attempt(lambda: _change(desk, queue, form)):
            return desk.back("queue", queue)
    length = overview.RANGES[overview.chosen_range(desk)][1]
    return desk.show(
        "queue.html",
        {
            "queue": known[queue],
            "form": form,
            "handlers": [each.name for each in registry.handlers() if each.options.queue == queue],
            "ranges": overview.range_links(desk),
            "charts": [chart.render() for chart in overview.charts(length, queue)],
        },
        controls="queue_form.html",
        title=_("Queue %s") % queue,
    )


def _policy(queue: str) -> dict[str, Any]:
    rows = QueueControl.objects.using(jobs_database()).filter(queue=queue)
    return rows.values(*POLICY).first() or {}


def _change(desk: Desk, queue: str, form: PolicyForm) -> bool:
    chosen = {name: form.cleaned_data[name] for name in POLICY}
    if queues.set_policy(queue, actor=desk.actor, **chosen):
        rows = QueueControl.objects.using(jobs_database()).filter(queue=queue)
        words = ", ".join(f"{name}={value or 'as configured'}" for name, value in chosen.items())
        desk.audit(f"Policy: {words}.")(list(rows))
        desk.tell(_("Changed. Running workers obey within two seconds."))
    else:
        desk.tell(_("Nothing was changed."), messages.INFO)
    return True


def pause(desk: Desk, queue: str) -> HttpResponse:
    """Stop handing out the jobs of a queue."""
    return _set_paused(desk, queue, is_paused=True)


def resume(desk: Desk, queue: str) -> HttpResponse:
    """Hand them out again."""
    return _set_paused(desk, queue, is_paused=False)


def _set_paused(desk: Desk, queue: str, *, is_paused: bool) -> HttpResponse:
    act = queues.pause if is_paused else queues.resume

    def change() -> None:
        if act(queue, actor=desk.actor):
            rows = QueueControl.objects.using(jobs_database()).filter(queue=queue)
            desk.audit("Paused." if is_paused else "Resumed.")(list(rows))
            text = _("Paused: %s") if is_paused else _("Resumed: %s")
            desk.tell(text % queue)
        else:
            text = _("It was paused already: %s") if is_paused else _("It was not paused: %s")
            desk.tell(text % queue, messages.WARNING)

    if queue not in {row["queue"] for row in queues.overview()}:
        raise Http404(_("No queue has this name."))
    desk.attempt(change)
    forget("queues")
    return desk.back("queues")


SCREENS = (
    Screen("queues", "queues/", show, title=gettext_lazy("Queues")),
    Screen("queue_pause", "queues/<path:queue>/pause/", pause, "pause_queue", is_action=True),
    Screen("queue_resume", "queues/<path:queue>/resume/", resume, "pause_queue", is_action=True),
    Screen("queue", "queues/<path:queue>/", show_one),
)
