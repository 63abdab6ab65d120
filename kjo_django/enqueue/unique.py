"""Jobs that are enqueued once in a window of time, or once it has been quiet.

Such a job has the unique id ``kjo-unique:<digest>:<number>``. The digest is made of the handler's
name and of the arguments that decide. Each window has a job of its own with the next number, so a
job that has begun or ended keeps its row, its result and its history.

Who enqueues looks for the job with the highest number. If that one does not stand for the new call,
the next number is inserted. Of several processes that insert the same number, the unique constraint
lets one store its job; the others wait for its commit, and then find that job. A job that waits is
given another payload by one UPDATE, which begins a new generation, so no message with the older
payload runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.enqueue.job_status import owners_of
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.models import Job
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.retries import LONGEST_DELAY
from kjo_django.running_job import running
from kjo_django.values import text, timedelta_of

PREFIX = "kjo-unique:"
"""Begins the unique ids that are made here; callers cannot give such an id."""
_NUMBER_DIGITS = 8
LOCKED_RETRIES = (0.02, 0.1)
"""Seconds before a locked row is looked at again while nobody can say who holds it."""


@dataclass(frozen=True, slots=True)
class UniqueRule:
    """What an enqueue does about the job that an earlier one has stored."""

    on_conflict: str = "keep"
    unique_for: timedelta | None = None
    """Of the windows; None where a debounce, or an id of the caller's, decides."""
    debounce: timedelta | None = None
    debounce_max: timedelta | None = None
    unique_by: tuple[str, ...] | None = None
    """The arguments that decide; None: all."""

    @property
    def names_jobs(self) -> bool:
        """Whether the unique ids of the jobs are made here."""
        return self.unique_for is not None or self.debounce is not None

    def key_of(self, key: str, name: str) -> str:
        """Return the key of a job: debounced ones without a key of their own run one at a time.

        :param name: the unique id of such jobs, without its number.
        """
        return name if self.debounce is not None and not key else key

    def apply_to(self, job: Job) -> None:
        """Have ``store`` treat an unsaved job by this rule."""
        job.unique_rule = self
        if self.debounce is not None:
            job.available_at = job.created_at + self.debounce


# --- Options --------------------------------------------------------------------------------------

ON_CONFLICT = ("keep", "replace", "raise")


def positive(value: Any) -> timedelta:
    """Return a delay that is longer than nothing."""
    found = timedelta_of(value)
    if not isinstance(found, timedelta) or not timedelta(0) < found <= LONGEST_DELAY:
        most = LONGEST_DELAY.days
        raise ValueError(f"a positive timedelta or number of seconds, of at most {most} days")
    return found


def argument_names(value: Any) -> tuple[str, ...]:
    """Return names of arguments, of which one may be given as a text."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list of names of arguments")
    return tuple(map(text, value))


def reaction(value: Any) -> str:
    """Return what to do about the job that is there."""
    if value not in ON_CONFLICT:
        raise ValueError(f"one of {', '.join(map(repr, ON_CONFLICT))}")
    return str(value)


CHECKS = {
    "unique_for": positive,
    "unique_by": argument_names,
    "debounce": positive,
    "debounce_max": positive,
    "on_conflict": reaction,
}


def convert(given: Any) -> None:
    """Check and convert what the options of one enqueue say of others.

    :param given: frozen ``EnqueueOptions`` that are being made.
    :raises ValueError: an option means nothing, or two of them contradict each other.
    """
    for name, check in CHECKS.items():
        if (value := getattr(given, name)) is not None:
            try:
                object.__setattr__(given, name, check(value))
            except ValueError as error:
                raise ValueError(f"{name} must be {error}, not {value!r}") from None
    check_together(given)


def check_declared(declared: HandlerOptions) -> None:
    """Check what a job's declaration says of other enqueues, each option checked already.

    :raises ValueError: two options contradict each other, or one means nothing alone.
    """
    check_together(declared)
    if declared.on_conflict is not None and not (declared.unique_for or declared.debounce):
        raise ValueError("on_conflict needs unique_for; with an id, give it to using()")


def check_together(given: Any) -> None:
    """Check the options that one call gives, each of which is checked already.

    :raises ValueError: two of them contradict each other, or one means nothing alone.
    """
    if given.unique_for is not None and given.debounce is not None:
        raise ValueError("Give unique_for or debounce, not both")
    if given.debounce is not None and given.on_conflict not in (None, "replace"):
        raise ValueError(
            f"debounce replaces the job that waits; leave on_conflict={given.on_conflict!r} out"
        )
    names_jobs = given.unique_for is not None or given.debounce is not None
    if getattr(given, "id", None) is not None and names_jobs:
        raise ValueError("Give id, or unique_for or debounce with unique_by, not both")
    if given.debounce is not None and (
        getattr(given, "delay", None) is not None or getattr(given, "run_at", None) is not None
    ):
        raise ValueError("debounce says when the job is due; leave delay and run_at out")


def rule_of(given: Any, handler: Handler) -> UniqueRule | None:
    """Return the rule of an enqueue; None where no other enqueue matters to it.

    :param given: the options of this enqueue. An id decides alone; else what they leave open the
        job's declaration says.
    :raises ValueError: ``unique_by`` is not about arguments of the handler, or has nothing to say.
    """
    declared = handler.options
    if given.id is not None:
        return rule_for_ids(given)
    source = given
    if given.unique_for is None and given.debounce is None:
        source = declared
    longest = given.debounce_max or source.debounce_max
    by = declared.unique_by if given.unique_by is None else given.unique_by
    if problem := _fault_of(given, handler, source, longest, by):
        raise ValueError(problem)
    if source.unique_for is None and source.debounce is None:
        return rule_for_ids(given)
    on_conflict = given.on_conflict or declared.on_conflict or "keep"
    return UniqueRule(
        "replace" if source.debounce is not None else on_conflict,
        source.unique_for,
        source.debounce,
        longest,
        by,
    )


def _fault_of(
    given: Any,
    handler: Handler,
    source: Any,
    longest: timedelta | None,
    by: Sequence[str] | None,
) -> str | None:
    """Return what is wrong with the options of an enqueue that make a rule; None: nothing.

    :param source: the options that say how long a window is.
    :param longest: what they say of ``debounce_max``.
    :param by: the arguments that are compared.
    """
    debounce, job = source.debounce, f"The job {handler.name}"
    if longest is not None and debounce is None:
        return f"{job}: debounce_max needs debounce"
    if longest is not None and longest < debounce:
        return f"{job}: debounce_max must not be shorter than debounce"
    if by is not None and source.unique_for is None and debounce is None:
        return f"{job}: unique_by needs unique_for or debounce"
    if debounce is not None and (given.delay is not None or given.run_at is not None):
        return f"{job} is debounced, which says when it is due; leave delay and run_at out"
    return handler.unknown_argument("unique_by", by or ())


def rule_for_ids(given: Any) -> UniqueRule | None:
    """Return the rule of an enqueue whose jobs have ids of the caller's; None: they are kept."""
    return None if given.on_conflict in (None, "keep") else UniqueRule(given.on_conflict)


# --- Unique ids -----------------------------------------------------------------------------------


def unique_name(rule: UniqueRule, handler: Handler, payload: Mapping[str, Any]) -> str:
    """Return the unique id of the jobs with these arguments, without its number.

    An argument that has its default is the same as one that is left out.
    """
    defaults = handler.defaults
    names = payload if rule.unique_by is None else rule.unique_by
    chosen = {
        name: payload[name]
        for name in names
        if name in payload and not (name in defaults and _is_same(payload[name], defaults[name]))
    }
    written = handler.options.serializer.dumps(_ordered({handler.name: chosen}))
    return f"{PREFIX}{hashlib.sha256(written).hexdigest()[:40]}"


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _ordered(value: Any) -> Any:
    """Return a value with the keys of its mappings in one order."""
    if isinstance(value, Mapping):
        return {name: _ordered(value[name]) for name in sorted(value, key=str)}
    return [_ordered(each) for each in value] if isinstance(value, (list, tuple)) else value


def numbered(name: str, number: int) -> str:
    """Return the unique id of a job.

    All numbers have as many digits, so texts have the order of the numbers in any collation.
    """
    return f"{name}:{number:0{_NUMBER_DIGITS}d}"


def number_of(job: Job) -> int:
    """Return the number in a unique id that was made here."""
    return int((job.unique_id or "").rpartition(":")[2])


def latest(using: str, queue: str, name: str) -> Job | None:
    """Return the job with the highest number, without its payload."""
    highest = 10**_NUMBER_DIGITS - 1
    ids = numbered(name, 0), numbered(name, highest)
    rows = Job.objects.using(using).filter(queue=queue, unique_id__range=ids)
    return rows.defer("payload").order_by("-unique_id").first()


# --- A job that has not begun ---------------------------------------------------------------------


def lock_waiting(using: str, key: Any) -> Job | None:
    """Lock a job that no worker is running, and return it as it is then; None if it has begun or
    ended. A job between two attempts is not running.

    A handler that runs in a transaction has its row locked for as long as it runs, and nobody waits
    for that: its worker's lease shows it. Who else locks the row holds it for a moment.
    """
    rows = Job.objects.using(using).defer("payload", "result").filter(pk=key)
    if connections[using].features.has_select_for_update:
        job = _lock_unless_it_runs(rows, using)
    else:
        job = rows.first()  # the transaction has written, so it is the only one that does
    if job is None or job.state not in states.OPEN or _has_row_lease(job):
        return None
    # Within a handler the lock may be this very transaction's: that of its own job, or of another
    # one of its group.
    return None if running.get() is not None and _is_leased(job) is not False else job


def _lock_unless_it_runs(rows: QuerySet[Job], using: str) -> Job | None:
    """Lock the job of ``rows``, waiting for who has locked it but is not running it."""
    features = connections[using].features
    no_key, skips = (
        features.has_select_for_no_key_update,
        features.has_select_for_update_skip_locked,
    )
    free = rows.select_for_update(skip_locked=skips, no_key=no_key)
    if (job := free.first()) is not None:
        return job
    for delay in LOCKED_RETRIES:
        locked = rows.first()
        is_leased = True if locked is None else _is_leased(locked)
        if is_leased:
            return None
        if is_leased is None:
            time.sleep(delay)
            job = free.first()
        else:
            job = rows.select_for_update(no_key=no_key).first()
        if job is not None:
            return job
    return None


def _has_row_lease(job: Job) -> bool:
    return job.lease_expires_at is not None and job.lease_expires_at > CLOCK.now()


def _is_leased(job: Job) -> bool | None:
    """Return whether a living worker has begun the job; None if that is not known."""
    if job.state not in states.OPEN:
        return False
    run: Any = running.get()
    runs = getattr(run, "items", (run,))
    if any(getattr(each, "job_id", None) == str(job.pk) for each in runs):
        return True
    try:
        return bool(owners_of([job]))
    except (CoordinationError, PublishError):
        return None
