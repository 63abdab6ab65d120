"""Brokers that answer and let us not in: a wrong password, an authority nobody trusts.

librdkafka takes that for an outage and tries on for ever; a question to it ends with its timeout,
and a word about the transport. Only the error callback, which is called in ``poll``, tells why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kjo_django.transports.kafka.clients import describe, error_of, logger, quiet
from kjo_django.transports.kafka.options import KafkaOptions, guarded

REPEAT_AFTER = 60.0
FIRST_WAIT = 1.0
"""Seconds; a refusal of a broker that is near takes a third of it."""

_SASL = ("sasl.username", "sasl.password", "sasl.mechanism")
SETTINGS = {
    KafkaError._AUTHENTICATION: _SASL,
    KafkaError.SASL_AUTHENTICATION_FAILED: _SASL,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: ("sasl.mechanism",),
    KafkaError._SSL: ("security.protocol", "ssl.ca.location"),
}
"""What to look at, by the code of the refusal."""
_SILENCE = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT})


def is_refusal(error: object) -> bool:
    """Return whether an error of a client says that a broker does not let it in."""
    return isinstance(error, KafkaError) and error.code() in SETTINGS


class Refusals:
    """What one client was told. Thread-safe: one reference is set."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._logged_at = 0.0
        self.reason: str | None = None
        """Why the client is not let in, and the settings to look at; never a value of them."""

    def note(self, error: KafkaError) -> None:
        """Remember a refusal, and log it once a minute; anything else says nothing about it."""
        if not is_refusal(error):
            return
        self.reason = self.explain(error)
        now = time.monotonic()
        if not self._logged_at or now > self._logged_at + REPEAT_AFTER:
            self._logged_at = now
            logger.error("A broker does not let us in: %s", self.reason)

    def explain(self, error: KafkaError) -> str:
        """Return an error as people should read it, and what to look at."""
        keys = ", ".join(SETTINGS.get(error.code(), ()))
        hint = f" (look at {keys} in {self._options.setting})" if keys else ""
        return f"{describe(error)}{hint}"

    def forget(self) -> None:
        """All is well."""
        self.reason = None
        self._logged_at = 0.0

    def list_topics(self, client: Any, timeout: float, *names: str) -> Any:
        """Ask for the cluster's metadata, or for that of a topic.

        Asked in waits that double, since the client is told of a refusal only between two.

        :param timeout: seconds.
        :raises KafkaException: with the refusal, as soon as it is known, or with what the client
            raises.
        """
        deadline, wait = time.monotonic() + timeout, FIRST_WAIT
        while True:
            left = deadline - time.monotonic()
            try:
                answer = client.list_topics(*names, timeout=min(wait, left))
            except KafkaException as error:
                client.poll(0)
                if self.reason is not None:
                    raise KafkaException(self.reason) from error
                code = error_of(error)
                if code is None or code.code() not in _SILENCE or left <= wait:
                    raise
                wait *= 2
            else:
                self.forget()
                return answer


def watched(
    config: dict[str, Any],
    note: Callable[[KafkaError], None],
    guard: Callable[[Callable[..., Any]], Callable[..., Any]] = quiet,
) -> dict[str, Any]:
    """Return a configuration whose errors are noted, and told to the project's own callback too.

    :param guard: wraps every callback: none may raise into the client.
    """
    config = guarded(config, quiet)
    theirs = config.get("error_cb")

    def on_error(error: KafkaError) -> None:
        note(error)
        if theirs is not None:
            theirs(error)

    return {**config, "error_cb": guard(on_error)}
