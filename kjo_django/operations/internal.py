"""Internal jobs: large work of operators that jobs of kjo_django's own carry out.

What such a job does is what its payload says, in the name of whom it names. So it runs only from a
row of ours, whatever a message says; a user's permission is checked again when it runs; and whoever
wants to run one again needs the permission of what it does.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from django.contrib.auth import get_user_model

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.exceptions import MessageError, PermanentError
from kjo_django.messages.envelope import Message
from kjo_django.messages.serializers import JSON
from kjo_django.models import Job
from kjo_django.operations.rows import checked_rate
from kjo_django.store.rows import JobRow
from kjo_django.store.transactions import jobs_database


class Action(enum.StrEnum):
    """What is done to many."""

    REPLAY_LETTERS = "replay_letters"
    DISCARD_LETTERS = "discard_letters"
    REQUEUE = "requeue"
    CANCEL = "cancel"
    RUN_NOW = "run_now"
    CHANGE_QUEUE = "change_queue"
    DISCARD = "discard"
    """Close the dead letters of the jobs that have failed."""


PERMISSIONS: Mapping[Action, str] = {
    Action.REPLAY_LETTERS: "kjo_django.replay_dlq",
    Action.DISCARD_LETTERS: "kjo_django.discard_dlq",
    Action.REQUEUE: "kjo_django.retry_job",
    Action.CANCEL: "kjo_django.cancel_job",
    Action.RUN_NOW: "kjo_django.retry_job",
    Action.CHANGE_QUEUE: "kjo_django.retry_job",
    Action.DISCARD: "kjo_django.discard_dlq",
}
"""What a user needs for each action."""
MAX_ACTOR = 150


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, ready for JSON."""

    action: str
    filter: dict[str, Any] | str
    asked_at: str
    actor: str = ""
    user: str = ""
    """The primary key of the user who asks; "" for a program, which may do everything."""
    note: str = ""
    queue: str = ""
    rate: float | None = None
    force: bool = False

    def __post_init__(self) -> None:
        checked_rate(self.rate)

    def asked_by(self, actor: str) -> Request:
        """Return the same request of somebody else."""
        return dataclasses.replace(self, actor=actor[:MAX_ACTOR], user=user_key(actor))


class UserActor(str):
    """A user who asks for an operation: a name for logs and notes, and whose permissions count.

    An actor that is a plain text is a program's, and no permission is asked of it.
    """

    user: Any

    def __new__(cls, user: Any) -> UserActor:
        """:param user: of ``django.contrib.auth``, or what a project has instead."""
        actor = super().__new__(cls, user.get_username())
        actor.user = user
        return actor


def user_key(actor: str) -> str:
    """Return the primary key of the user that an actor is; "" for a program."""
    return str(actor.user.pk) if isinstance(actor, UserActor) else ""


def actor_of(request: Request) -> str:
    """Return who a request runs for; asked when it runs.

    :raises PermanentError: it was a user, who by now may not do this.
    """
    if not request.user:
        return request.actor
    users = get_user_model()._default_manager
    try:
        user = users.filter(pk=request.user).first()
    except (TypeError, ValueError):
        user = None  # the project has another model of users by now
    if user is None:
        raise PermanentError(f"{request.actor}, who asked for this, is no longer a user")
    if not user.is_active:
        raise PermanentError(f"{request.actor}, who asked for this, is not active any more")
    permission = PERMISSIONS[Action(request.action)]
    if not user.has_perm(permission):
        raise PermanentError(
            f"{request.actor}, who asked for this, lacks the permission {permission}"
        )
    return UserActor(user)


# --- Rows -----------------------------------------------------------------------------------------


def is_internal(handler: str) -> bool:
    """Whether jobs of this handler are internal ones."""
    return isinstance(registry.find(handler), InternalHandler)


def may_run_again(job: Job, actor: str) -> bool:
    """Whether somebody may requeue, replay or hurry a job. What its queue's permission allows is
    checked by who asks; this is what an internal job wants besides."""
    if not isinstance(actor, UserActor) or not is_internal(job.handler):
        return True
    request = _request_of(job)
    return request is not None and bool(actor.user.has_perm(PERMISSIONS[Action(request.action)]))


def reassign(job: Job, actor: str) -> bool:
    """Let the next run of an internal job be in the name of who asked for it.

    :returns: whether the payload has changed, which is to be stored. That of any other job, or of
        one nobody in particular asks for, is left as it is.
    """
    request = _request_of(job) if actor and is_internal(job.handler) else None
    if request is None:
        return False
    job.payload = JSON.dumps(dataclasses.asdict(request.asked_by(actor)))
    return True


def _request_of(job: Job) -> Request | None:
    try:
        request = Request(**JSON.loads(bytes(job.payload)))
        Action(request.action)
    except (MessageError, TypeError, ValueError):
        return None
    return request


class InternalHandler(registry.Handler):
    """A handler of an internal job; the project's middleware, made for its own jobs, is not run."""

    runs_middleware = False

    def refusal(self, message: Message, row: JobRow | None) -> MessageError | None:
        """Refuse a message that is not made of a row of ours: anybody who can write to a topic
        could otherwise have done what needs a permission, under any name."""
        if row is None or message.job_id != str(row.id) or not _is_ours(message):
            return MessageError("invalid", f"{self.name} runs only as a job that was enqueued here")
        stored = Job.objects.using(jobs_database()).filter(pk=row.id, handler=self.name)
        known = stored.values_list("payload", "content_type").first()
        if known is None or (bytes(known[0]), known[1]) != (message.payload, message.content_type):
            return MessageError("invalid", f"The message is not that of the job {row.id}")
        return None


def _is_ours(message: Message) -> bool:
    return message.service == get_settings().service_name
