"""Internal jobs: large work of operators that jobs of kjo_django's own carry out.

What such a job does is what its payload says, in the name of whom it names. So it runs only from a
row of ours, whatever a message says; a user's permission is checked again when it runs; and whoever
wants to run one again needs the permission of what it does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.exceptions import MessageError, PermanentError
from kjo_django.messages.headers import Message
from kjo_django.messages.serializers import JSON
from kjo_django.models import Job
from kjo_django.operations.rows import checked_rate
from kjo_django.runtime import jobs_database
from kjo_django.store.rows import JobRow

MAX_ACTOR = 150


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, ready for JSON."""

    action: str
    """A key of ``operations.actions.ACTIONS``."""
    filter: dict[str, Any] | str
    asked_at: str
    actor: str = ""
    user: str = ""
    """The primary key of the user who asks; "" for a program, which may do everything."""
    rate: float | None = None
    """At most so many rows a second."""
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the action, by name."""

    def __post_init__(self) -> None:
        checked_rate(self.rate)

    def asked_by(self, actor: str) -> Request:
        """Return the same request of somebody else."""
        user = str(actor.user.pk) if isinstance(actor, UserActor) else ""
        return dataclasses.replace(self, actor=actor[:MAX_ACTOR], user=user)


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


def actor_of(request: Request, permission: str) -> str:
    """Return who a request runs for; asked when it runs.

    :param permission: what the action takes, with the app's label.
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
    """Return whether somebody may requeue, replay or hurry a job, as far as it is an internal one:
    a user needs the permission of what it does. The permission to requeue is asked elsewhere."""
    handler = registry.find(job.handler)
    if not isinstance(actor, UserActor) or not isinstance(handler, InternalHandler):
        return True
    request = _request_of(job)
    permission = request and handler.permission_of(request)
    return bool(permission) and bool(actor.user.has_perm(permission))


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
        return Request(**JSON.loads(bytes(job.payload)))
    except (MessageError, TypeError, ValueError):
        return None


class InternalHandler(registry.Handler):
    """A handler of an internal job; the project's middleware, made for its own jobs, is not run.

    :param permission_of: returns what a user needs for a request, with the app's label, or None
        for one whose action is unknown.
    """

    runs_middleware = False

    def __init__(
        self,
        function: Callable[..., Any],
        options: registry.HandlerOptions,
        permission_of: Callable[[Request], str | None],
    ) -> None:
        super().__init__(function, options)
        self.permission_of = permission_of

    def refusal(self, message: Message, row: JobRow | None) -> MessageError | None:
        """Refuse a message that is not made of a row of ours: anybody who can write to a topic
        could otherwise have done what needs a permission, under any name."""
        is_ours = message.service == get_settings().service_name
        if row is None or message.job_id != str(row.id) or not is_ours:
            return MessageError("invalid", f"{self.name} runs only as a job that was enqueued here")
        stored = Job.objects.using(jobs_database()).filter(pk=row.id, handler=self.name)
        known = stored.values_list("payload", "content_type").first()
        if known is None or (bytes(known[0]), known[1]) != (message.payload, message.content_type):
            return MessageError("invalid", f"The message is not that of the job {row.id}")
        return None
