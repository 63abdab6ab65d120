"""From a request's body to a stored job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.db import transaction
from rest_framework.exceptions import ValidationError

from kjo_django import registry
from kjo_django.enqueue.definition import EnqueueOptions, JobDefinition
from kjo_django.enqueue.storing import EnqueueResult, store
from kjo_django.exceptions import PayloadError
from kjo_django.models import Job
from kjo_django.store.transactions import jobs_database

OPTIONS = ("key", "queue", "delay", "run_at", "expires_at", "max_attempts", "result_ttl")


def enqueue(body: dict[str, Any], on_stored: Callable[[Sequence[Job]], None]) -> EnqueueResult:
    """Store the job a validated body describes; everything is checked before anything is written.

    :param on_stored: told of a new job inside the transaction that stores it.
    :raises ValidationError: no such handler, or it does not take these arguments or options.
    """
    job = _build(body)
    using = jobs_database()
    with transaction.atomic(using=using):
        answer = store([job])[0]
        if answer.is_new:
            on_stored([job])
    return answer


def is_for_callers(handler: registry.Handler) -> bool:
    """Whether a program outside may enqueue it: what ``@job`` declares in the project.

    Those of queues, events and tasks take messages that their own side makes and checks. Our own
    do what needs more than the permission to enqueue, for whoever their payload names.
    """
    return type(handler) is registry.Handler and handler in registry.handlers()


def _build(body: dict[str, Any]) -> Job:
    handler = registry.find(body["handler"])
    if handler is None or not is_for_callers(handler):
        raise ValidationError({"handler": f"No job is named {body['handler']!r}."}, code="unknown")
    given = {name: body[name] for name in OPTIONS if body.get(name) is not None}
    try:
        options = EnqueueOptions(id=body.get("unique_id"), **given)
    except ValueError as error:
        raise ValidationError(str(error)) from None
    payload = body["payload"]
    problem = handler.check_arguments(payload)
    if problem is not None:
        raise ValidationError({"payload": problem}, code="arguments")
    try:
        return JobDefinition(handler, options).build(payload)
    except PayloadError as error:
        raise ValidationError({"payload": str(error)}) from None
    except ValueError as error:
        raise ValidationError(str(error)) from None
