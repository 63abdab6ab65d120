"""Which limits a job has: declared with it, by its queue, or by an operator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kjo_django.conf import QueueConf
from kjo_django.coordination.starts import Pace
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import JSON, load_value, storable_text
from kjo_django.models import LimitControl
from kjo_django.registry import Handler
from kjo_django.runtime import Runtime
from kjo_django.values import Rate
from kjo_django.values import rate as read_rate

logger = get_logger("kjo_django")

MAX_KEY = 120
"""Characters of a key that stand in a name; a digest stands for a longer one."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, for one value of its key: a rate, or a number of slots."""

    name: str
    """What coordination knows it by, and the jobs that wait for it."""
    rate: Rate | None = None
    slots: int = 0

    @property
    def pace(self) -> Pace:
        """The rate as coordination is asked for it."""
        assert self.rate is not None
        rate = self.rate
        most = rate.count + rate.burst - 1
        return Pace(self.name, most, rate.seconds, rate.interval, rate.ahead)


def job_limit(handler: str) -> str:
    """Return the name under which an operator changes the limits of a handler's jobs."""
    return f"job:{handler}"


def queue_limit(queue: str) -> str:
    """Return the name under which an operator changes the limits of a queue's jobs."""
    return f"queue:{queue}"


def is_limited(runtime: Runtime, handler: Handler, queue: QueueConf) -> bool:
    """Return whether jobs of this handler in this queue may have a limit."""
    controls, options = runtime.limit_controls, handler.options
    return (
        options.rate is not None
        or options.concurrency is not None
        or queue.rate is not None
        or job_limit(handler.name) in controls
        or queue_limit(queue.name) in controls
    )


def computes_key(handler: Handler, content_type: str) -> bool:
    """Return whether code of the project's, or of a serializer's, is called to tell the limits of a
    job."""
    keys = handler.options.rate_key, handler.options.concurrency_key
    is_read = content_type != JSON.content_type
    return any(callable(key) or (is_read and key is not None) for key in keys)


def limits_of(
    runtime: Runtime, handler: Handler, queue: QueueConf, payload: bytes, content_type: str
) -> list[Limit]:
    """Return the limits of a job, that of how many run at once first.

    :param payload: the keys of its limits are read from it.
    """
    controls, options = runtime.limit_controls, handler.options
    own, common = controls.get(job_limit(handler.name)), controls.get(queue_limit(queue.name))
    slots = own.concurrency if own is not None and own.concurrency else options.concurrency
    rate = rate_of(own, options.rate)
    queue_rate = rate_of(common, queue.rate)
    found = []
    if slots is not None:
        key = _key(options.concurrency_key, handler, payload, content_type)
        found.append(Limit(f"SLOT:{job_limit(handler.name)}{key}", slots=slots))
    if rate is not None:
        key = _key(options.rate_key, handler, payload, content_type)
        found.append(Limit(f"RATE:{job_limit(handler.name)}{key}", rate))
    if queue_rate is not None:
        found.append(Limit(f"RATE:{queue_limit(queue.name)}", queue_rate))
    return found


def rate_of(control: LimitControl | None, declared: Rate | None) -> Rate | None:
    """Return the rate in force: an operator's, else the declared one; the burst likewise."""
    if control is None:
        return declared
    try:
        rate = read_rate(control.rate) if control.rate else declared
    except ValueError as error:  # written past the service functions
        logger.error("The rate of %s is not obeyed: it must be %s", control.name, error)
        rate = declared
    if rate is None or control.burst is None:
        return rate
    return replace(rate, burst=max(1, control.burst))


def _key(
    declared: str | Callable[..., Any] | None, handler: Handler, payload: bytes, content_type: str
) -> str:
    """Return how the key's value ends the name of a limit; "" where there is none.

    Anybody may have written the payload. Jobs whose key cannot be told share one limit.
    """
    if declared is None:
        return ""
    try:
        given = load_value(payload, content_type)
        value = given.get(declared) if isinstance(declared, str) else declared(**given)
        text = "" if value is None else str(value)
    except Exception as error:
        logger.warning("The key of a limit of %s cannot be computed: %r", handler.name, error)
        return ""
    if len(text) > MAX_KEY or storable_text(text) != text:
        text = "sha256:" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return f":{text}" if text else ""
