"""Assertions about enqueued jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kjo_django.enqueue.definition import JobDefinition
from kjo_django.exceptions import KjoError
from kjo_django.messages.serializers import serializer_for
from kjo_django.models import Job
from kjo_django.patterns.queue import Queue
from kjo_django.runtime import jobs_database

Target = JobDefinition[..., Any] | Queue | str
ANY: Any = type("ANY", (), {"__repr__": lambda self: "ANY"})()
"""Matches any payload."""


def all_enqueued(
    job: Target | None = None,
    payload: Any = ANY,
    *,
    queue: str | None = None,
    id: str | None = None,
    key: str | None = None,
) -> list[Job]:
    """Return the open jobs that match, in the order they were enqueued.

    :param job: a job, a ``Queue``, or a handler's name.
    :param payload: compared as it comes back from its serializer, so a UUID equals its text. Of an
        object only the fields given are compared.
    :param queue: the name of its queue.
    :param id: the unique id.
    :param key: its key.
    """
    rows = Job.objects.using(jobs_database()).open().filter(destination="").order_by("created_at")
    if job is not None:
        rows = rows.filter(handler=name_of(job))
    for column, value in (("queue", queue), ("unique_id", id), ("key", key)):
        if value is not None:
            rows = rows.filter(**{column: value})
    return [row for row in rows.order_by("created_at", "pk") if _matches(row, payload)]


def assert_enqueued(
    job: Target | None = None, payload: Any = ANY, *, count: int | None = None, **filters: Any
) -> Job:
    """Return the newest open job that matches; fail, with the list of open jobs, if none does.

    :param job: as of ``all_enqueued``.
    :param payload: as of ``all_enqueued``.
    :param count: the exact number of matching jobs.
    :param filters: further arguments of ``all_enqueued``.
    :raises AssertionError: none matches, or not as many as ``count``.
    """
    __tracebackhide__ = True
    found = all_enqueued(job, payload, **filters)
    if count is not None and len(found) != count:
        raise AssertionError(
            f"{len(found)} jobs match {_wanted(job, payload, filters)}, not {count}. {_present()}"
        )
    if not found:
        raise AssertionError(f"No job matches {_wanted(job, payload, filters)}. {_present()}")
    return found[-1]


def refute_enqueued(job: Target | None = None, payload: Any = ANY, **filters: Any) -> None:
    """Fail if an open job matches.

    :param job: as of ``all_enqueued``.
    :param payload: as of ``all_enqueued``.
    :param filters: further arguments of ``all_enqueued``.
    :raises AssertionError: one matches; the message lists the open jobs.
    """
    __tracebackhide__ = True
    found = all_enqueued(job, payload, **filters)
    if found:
        raise AssertionError(
            f"{len(found)} jobs match {_wanted(job, payload, filters)}. {_present()}"
        )


def name_of(job: Target) -> str:
    """Return the handler's name in the job's rows."""
    if isinstance(job, JobDefinition):
        return job.name
    return job.job_type if isinstance(job, Queue) else job


def payload_of(job: Job) -> Any:
    """Return a job's payload as its handler would get it; a text with the reason if it cannot be
    read.
    """
    try:
        return serializer_for(job.content_type).loads(bytes(job.payload))
    except KjoError as error:
        return f"unreadable: {error}"


def _matches(job: Job, wanted: Any) -> bool:
    if wanted is ANY:
        return True
    serializer = serializer_for(job.content_type)
    # Through the serializer, as the payload went: a tuple becomes a list, a date its text.
    wanted = serializer.loads(serializer.dumps(wanted))
    found = payload_of(job)
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return all(name in found and found[name] == value for name, value in wanted.items())
    return bool(found == wanted)


def _wanted(job: Target | None, payload: Any, filters: Mapping[str, Any]) -> str:
    parts = [] if job is None else [name_of(job)]
    if payload is not ANY:
        parts.append(repr(payload))
    parts += [f"{name}={value!r}" for name, value in filters.items()]
    return " ".join(parts) or "anything"


def _present() -> str:
    jobs = all_enqueued()
    if not jobs:
        return "Nothing is enqueued."
    lines = [f"\n  {job.handler} {payload_of(job)!r:.200}" for job in jobs[:20]]
    more = f"\n  and {len(jobs) - 20} more" if len(jobs) > 20 else ""
    return "Enqueued:" + "".join(lines) + more
