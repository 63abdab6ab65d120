"""A job that somebody enqueues by hand or over HTTP: checked first, then stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.enqueue.definition import EnqueueOptions, JobDefinition, unsaved_job
from kjo_django.enqueue.handle import JobHandle
from kjo_django.enqueue.storing import store
from kjo_django.models import Job
from kjo_django.refusals import Wording
from kjo_django.runtime import database_of, use_database
from kjo_django.schedules.declarations import argument_fault


def handlers() -> list[str]:
    """Return the names of the handlers that people may enqueue, sorted."""
    return sorted(each.name for each in registry.handlers() if is_for_callers(each))


def is_for_callers(handler: registry.Handler) -> bool:
    """Return whether people may enqueue a handler: those that the project declares with ``@job``.

    Queues, events and tasks make and check their messages themselves. Internal handlers do what
    takes more permissions than the one to enqueue.
    """
    return type(handler) is registry.Handler and handler in registry.handlers()


def enqueue(
    name: str,
    payload: dict[str, Any],
    options: Mapping[str, Any],
    *,
    on_stored: Callable[[Sequence[Job]], None],
) -> JobHandle[Any]:
    """Store a job; everything is checked before anything is written.

    :param options: of ``EnqueueOptions``.
    :param on_stored: called with a new job inside the transaction that stores it.
    :raises LookupError: there is no such handler.
    :raises TypeError: it does not take these arguments.
    :raises PayloadError: they cannot be stored.
    :raises ValueError: an option is wrong.
    """
    job = _build(name, payload, options)
    with use_database(database_of(job.queue)) as runtime, transaction.atomic(runtime.database):
        answer = store([job])[0]
        if answer.answer in ("queued", "replaced"):
            on_stored([job])
    return answer


def _build(name: str, payload: dict[str, Any], options: Mapping[str, Any]) -> Job:
    handler = registry.find(name)
    if handler is None or not is_for_callers(handler):
        raise LookupError(Wording(_("No job is named %(name)r."), {"name": name}))
    made = EnqueueOptions(**options)
    if fault := handler.check_arguments(payload):
        raise TypeError(argument_fault(fault))
    return unsaved_job(JobDefinition(handler, made), payload)
