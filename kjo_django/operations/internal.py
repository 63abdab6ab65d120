"""Internal jobs: jobs of kjo_django's own that carry out the requests of operators.

The payload says what is done and for whom. So an internal job runs only from a row of this service,
whatever a message says. A user's permission is checked again when it runs. To run one again takes
the permission of its request.
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
    """An action that an operator asked for, ready for JSON."""

    action: str
    """A key of ``operations.actions.ACTIONS``."""
    filter: dict[str, Any] | str
    asked_at: str
    actor: str = ""
    user: str = ""
    """The primary key of the user who asked; "" for a program, which may do everything."""
    rate: float | None = None
    """At most so many rows a second."""
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The action's inputs by name."""

    def __post_init__(self) -> None:
        checked_rate(self.rate)

    def asked_by(self, actor: str) -> Request:
        """Return the request with another actor."""
        user = str(actor.user.pk) if isinstance(actor, UserActor) else ""
        return dataclasses.replace(self, actor=actor[:MAX_ACTOR], user=user)


class UserActor(str):
    """A user who asks for an operation: a name for logs and notes, with the user's permissions.

    A plain string is the name of a program, which needs no permission.
    """

    user: Any

    def __new__(cls, user: Any) -> UserActor:
        """:param user: of ``django.contrib.auth``, or what a project has instead."""
        actor = super().__new__(cls, user.get_username())
        actor.user = user
        return actor


def actor_of(request: Request, permission: str) -> str:
    """Return the actor of a request that runs now.

    :param permission: the permission of the action, with the app's label.
    :raises PermanentError: the user is gone, is not active, or lacks the permission by now.
    """
    if not request.user:
        return request.actor
    users = get_user_model()._default_manager
    try:
        user = users.filter(pk=request.user).first()
    except (TypeError, ValueError):
        user = None  # the project has another model of users by now
    if user is None:
        raise PermanentError(f"{request.actor}, who started this, is no longer a user")
    if not user.is_active:
        raise PermanentError(f"{request.actor}, who started this, is no longer active")
    if not user.has_perm(permission):
        raise PermanentError(
            f"{request.actor}, who started this, lacks the permission {permission}"
        )
    return UserActor(user)


# --- Rows -----------------------------------------------------------------------------------------


def is_internal(handler: str) -> bool:
    """Whether jobs of this handler are internal jobs."""
    return isinstance(registry.find(handler), InternalHandler)


def may_run_again(job: Job, actor: str) -> bool:
    """Whether the actor may requeue, replay or hurry a job.

    For an internal job a user needs the permission of its request. The permission to requeue is
    checked elsewhere.
    """
    handler = registry.find(job.handler)
    if not isinstance(actor, UserActor) or not isinstance(handler, InternalHandler):
        return True
    request = request_of(job)
    permission = request and handler.permission_of(request)
    return bool(permission) and bool(actor.user.has_perm(permission))


def reassign(job: Job, actor: str) -> bool:
    """Put the actor into the payload of an internal job; return whether the payload has changed.

    The caller stores the payload. That of any other job, or for an empty actor, stays.
    """
    request = request_of(job) if actor and is_internal(job.handler) else None
    if request is None:
        return False
    job.payload = JSON.dumps(dataclasses.asdict(request.asked_by(actor)))
    return True


def request_of(job: Job) -> Request | None:
    """Return the request of an internal job, or None if its payload is none."""
    try:
        return Request(**JSON.loads(bytes(job.payload)))
    except (MessageError, TypeError, ValueError):
        return None


class InternalHandler(registry.Handler):
    """A handler of an internal job. The project's middleware does not run.

    :param permission_of: returns the permission that a request needs, with the app's label, or None
        if its action is unknown.
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
        """Return an error for a message that was not made from a row of this service, else None.

        Anybody who can write to a topic could otherwise act without a permission, under any name.
        """
        is_ours = message.service == get_settings().service_name
        if row is None or message.job_id != str(row.id) or not is_ours:
            return MessageError("invalid", f"{self.name} runs only as a job that was enqueued here")
        stored = Job.objects.using(jobs_database()).filter(pk=row.id, handler=self.name)
        known = stored.values_list("payload", "content_type").first()
        if known is None or (bytes(known[0]), known[1]) != (message.payload, message.content_type):
            return MessageError("invalid", f"The message is not that of the job {row.id}")
        return None
