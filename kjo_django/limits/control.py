"""Changing the limits that hold over all workers, while they run.

A limit has the name ``queue:<queue>`` or ``job:<registered name>``. What an operator asks of it is
in a row, and wins over what was declared; running workers obey within two seconds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef
from django.utils.translation import gettext_noop as _

from kjo_django import registry, signals
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.coordination.base import slot_name
from kjo_django.enqueue.definition import MOST_SLOTS
from kjo_django.enqueue.job_status import leased_jobs
from kjo_django.exceptions import CoordinationError
from kjo_django.limits import lines
from kjo_django.limits.rules import job_limit, queue_limit, rate_of
from kjo_django.models import Job, LimitControl, is_scheduled
from kjo_django.refusals import RefusedError, Wording
from kjo_django.runtime import Runtime, current_runtime, get_coordination, refuse_elsewhere
from kjo_django.states import JobState
from kjo_django.store.counting import COUNT_LIMIT, many_grouped_counts
from kjo_django.values import MOST_AT_ONCE, meant_by, rate, refuse_unknown, whole

Observer = Callable[[Sequence[Any]], None]
MOST_SHOWN = 100
"""Slots of one limit that are looked for to be counted."""
LOOKED_AT = 20_000
"""Rows of each state of which it is asked whether they wait in their queue; they are read from the
table, as no index says when they are due."""
MOST_RUNNING = 500
"""Oldest queued jobs of which it is asked whether they run: those that run are among the first."""
OPTIONS = ("rate", "burst", "concurrency")
"""What may be asked of a limit."""


def set_limit(
    name: str, *, actor: str = "", on_changed: Observer | None = None, **options: Any
) -> bool:
    """Change a limit; return False if nothing changed. What is not given stays as it is asked; with
    None the declared value holds again.

    :param name: ``queue:<queue>`` or ``job:<registered name>``.
    :param on_changed: called with the row inside the transaction.
    :param options: ``rate``: as ``"5/s"``. ``burst``: a whole number. ``concurrency``: jobs of a
        handler that run at once in all workers together.
    :raises TypeError: there is no such option.
    :raises ValueError: nothing has this name, or a value means nothing.
    """
    refuse_unknown(options, OPTIONS, "set_limit")
    values = {option: check_value(name, option, value) for option, value in options.items()}
    runtime = current_runtime()
    rows = LimitControl.objects.using(runtime.database)
    # What was asked of a job that is gone since can be taken back.
    if any(values.values()) or not rows.filter(name=name).exists():
        check_name(name)
    if not values:
        return False
    with runtime.store.writing():
        runtime.store.insert_missing([LimitControl(name=name)])
        stamp = {"changed_by": actor[:150], "updated_at": CLOCK.now()}
        changed = rows.filter(name=name).exclude(**_same(values)).update(**values, **stamp)
        rows.filter(name=name, rate="", burst=None, concurrency=None).delete()
        if changed:
            _announce(name, actor, values, rows.filter(name=name), on_changed)
    return bool(changed)


def clear_limit(name: str, *, actor: str = "", on_changed: Observer | None = None) -> bool:
    """Let what was declared hold again; return False if nothing else was asked."""
    asked: dict[str, Any] = {"rate": None, "burst": None, "concurrency": None}
    rows = LimitControl.objects.using(current_runtime().database)
    if not rows.filter(name=name).exists():
        return False
    return set_limit(name, actor=actor, on_changed=on_changed, **asked)


def overview() -> list[dict[str, Any]]:
    """Return every limit with what was declared, what an operator asked, what holds, and how many
    jobs wait for it. The number of queries does not depend on how many limits there are.

    ``waiting_count`` is the number of the limit's jobs, whatever their keys, that are due and have
    not started: those in line, and pending and queued jobs that no worker has met. A retry that is
    due counts once a worker has met it. ``in_line_count`` of them are in line, which includes those
    that are released and on their way to a worker; the limit alone releases them.

    ``waiting_is_lower_bound`` is true where there may be more: 100,000 in line are counted, and of
    all queues together 20,000 pending and 20,000 queued jobs are looked at.
    """
    runtime, settings = current_runtime(), get_settings()
    controls = {row.name: row for row in LimitControl.objects.using(runtime.database)}
    declared: dict[str, dict[str, Any]] = {}
    for queue in filter(runtime.holds, registry.queue_names()):
        declared[queue_limit(queue)] = {"rate": settings.queue(queue).rate, "concurrency": None}
    for handler in registry.handlers():
        options = handler.options
        declared[job_limit(handler.name)] = {
            "rate": options.rate,
            "concurrency": options.concurrency,
            "rate_key": _key_text(options.rate_key),
            "concurrency_key": _key_text(options.concurrency_key),
        }
    found = []
    for name in sorted({*declared, *controls}):
        own, control = declared.get(name, {"rate": None, "concurrency": None}), controls.get(name)
        if control is not None or own["rate"] is not None or own["concurrency"] is not None:
            # One that nobody has asked for says nothing.
            found.append(_shown(name, own, control or LimitControl()))
    if found:
        _add_waiting(runtime, found)
        _add_taken_slots(found)
    return found


def _shown(name: str, own: Mapping[str, Any], control: LimitControl) -> dict[str, Any]:
    """Return what ``overview`` says of a limit.

    :param own: what was declared.
    :param control: what an operator has asked.
    """
    in_force = rate_of(control, own["rate"])
    return {
        "name": name,
        "declared": {
            "rate": _rate_text(own["rate"]),
            "burst": own["rate"].burst if own["rate"] else None,
            "concurrency": own["concurrency"],
        },
        "asked": {
            "rate": control.rate or None,
            "burst": control.burst,
            "concurrency": control.concurrency,
        },
        "rate": _rate_text(in_force),
        "burst": in_force.burst if in_force else None,
        "concurrency": control.concurrency or own["concurrency"],
        "rate_key": own.get("rate_key", ""),
        "concurrency_key": own.get("concurrency_key", ""),
        "changed_by": control.changed_by,
    }


def is_known(name: str) -> bool:
    """Return whether a queue or a job of this name may have a limit."""
    try:
        check_name(name)
    except ValueError:
        return False
    return True


def _add_waiting(runtime: Runtime, found: Sequence[dict[str, Any]]) -> None:
    """Add to each limit how many jobs wait for it, by two queries of the line, two of jobs, and
    what coordination needs to say which of these run."""
    in_line = lines.waiting_counts(runtime, [row["name"] for row in found])
    unmet, is_capped = _unmet_jobs(runtime)
    for row in found:
        count = in_line[row["name"]]
        row["waiting_count"] = count + max(0, unmet[row["name"]])
        row["in_line_count"] = count
        row["waiting_is_lower_bound"] = is_capped or count >= COUNT_LIMIT


def _unmet_jobs(runtime: Runtime) -> tuple[Counter[str], bool]:
    """Return by the name of a limit how many of its jobs are due, neither run nor are in line, and
    whether only the first rows were looked at."""
    jobs = Job.objects.using(runtime.database).order_by("pk")
    place = lines.rows(runtime).filter(job_id=OuterRef("pk"), generation=OuterRef("generation"))
    is_later = ExpressionWrapper(is_scheduled(CLOCK.now()), output_field=BooleanField())
    looked_at = jobs.annotate(is_in_line=Exists(place), is_later=is_later)
    states = (JobState.PENDING, JobState.QUEUED)
    found = many_grouped_counts(
        {str(state): looked_at.filter(state=state) for state in states},
        ("queue", "handler", "is_later", "is_in_line"),
        limit=LOOKED_AT,
    )
    counts: Counter[str] = Counter()
    for groups, _is_capped in found.values():
        for (queue, handler, later, met), (count, _oldest) in groups.items():
            if not later and not met:
                counts[queue_limit(queue)] += count
                counts[job_limit(handler)] += count
    queued = list(jobs.filter(state=JobState.QUEUED).defer("payload", "result")[:MOST_RUNNING])
    running = leased_jobs(queued)
    for job in queued:
        if job.pk in running:
            counts[queue_limit(job.queue)] -= 1
            counts[job_limit(job.handler)] -= 1
    return counts, any(is_capped for _groups, is_capped in found.values())


def _add_taken_slots(found: Sequence[dict[str, Any]]) -> None:
    """Add to each limit how many of its slots are taken; None where each key has slots of its own,
    there are none or very many, or coordination is away."""
    leases = {
        row["name"]: [slot_name(f"SLOT:{row['name']}", n + 1) for n in range(row["concurrency"])]
        for row in found
        if row["concurrency"] and not row["concurrency_key"] and row["concurrency"] <= MOST_SHOWN
    }
    wanted = [name for names in leases.values() for name in names]
    try:
        taken: Collection[str] = get_coordination().holders(wanted) if wanted else ()
    except CoordinationError:
        leases = {}
    for row in found:
        names = leases.get(row["name"])
        row["taken_count"] = None if names is None else len({*names}.intersection(taken))


def _rate_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else getattr(key, "__name__", "") if key else ""


def _same(values: dict[str, Any]) -> dict[str, Any]:
    """Return the condition for a row that has these values."""
    return {
        f"{name}__isnull" if value is None else name: True if value is None else value
        for name, value in values.items()
    }


def check_value(name: str, option: str, value: Any) -> Any:
    """Return what is asked of a limit as its row has it.

    :raises ValueError: it means nothing.
    """
    if value is None:
        return "" if option == "rate" else None
    if option == "concurrency" and name.startswith("queue:"):
        text = _(
            "concurrency must be of a job; that of a queue in one worker is changed by set_policy()"
        )
        raise RefusedError(text)
    most = MOST_SLOTS if option == "concurrency" else MOST_AT_ONCE
    try:
        return str(rate(value)) if option == "rate" else whole(1, most)(value)
    except ValueError as error:
        text = _("%(option)s must be %(wanted)s, not %(value).80s")
        raise RefusedError(text, option=option, wanted=error, value=repr(value)) from None


def check_name(name: str) -> None:
    """Check that a queue or a job of this name may have a limit in this thread's database.

    :raises ValueError: none may.
    """
    kind, _colon, of = name.partition(":")
    known: Collection[str] = [handler.name for handler in registry.handlers()]
    if kind == "queue":
        known = registry.queue_names()
    elif kind != "job":
        raise RefusedError(_("A limit is named queue:… or job:…, not %(name).120r"), name=name)
    if of not in known:
        every = Wording(_("Known: %(names)s."), {"names": ", ".join(known)})
        hint = meant_by(of, known, every)
        text = _("No job is named %(name).120r. %(hint)s")
        if kind == "queue":
            text = _("No queue is named %(name).120r. %(hint)s")
        raise RefusedError(text, name=of, hint=hint)
    if kind != "queue":
        return
    if registry.route_of(of) is not registry.JOBS:
        text = _("The queue %(name)r holds messages of other services, which have no limit")
        raise RefusedError(text, name=of)
    refuse_elsewhere(of)


def _announce(
    name: str, actor: str, values: dict[str, Any], rows: Any, on_changed: Observer | None
) -> None:
    runtime = current_runtime()
    # Those that are on their way were released by the limit of before.
    lines.call_back(runtime, name)
    if on_changed is not None:
        on_changed(list(rows) or [LimitControl(name=name)])
    send = functools.partial(
        signals.limit_changed.send_robust, sender=name, name=name, actor=actor, changes=values
    )
    transaction.on_commit(send, using=runtime.database, robust=True)
