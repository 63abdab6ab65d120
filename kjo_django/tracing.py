"""The interface through which producers, the relay and workers report to a tracer, if there is one.

Nothing here knows OpenTelemetry. ``kjo_django.contrib.opentelemetry`` installs a tracer; without it
each place costs one ``is None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Tracer(Protocol):
    """Receives what happens to a job. No method raises: a trace is no reason for a job to fail.

    Jobs, records, deliveries and outcomes are those of the layers above, which import this one.
    """

    def __hash__(self) -> int: ...

    def headers(self) -> dict[str, str]:
        """Return the headers that carry what is current here; none where nothing is."""

    def trace_id(self) -> str:
        """Return the id of the current trace in hexadecimal, or ""."""

    def enqueuing(self, jobs: Sequence[Any]) -> AbstractContextManager[object]:
        """Enclose the storing of ``Job`` rows; their headers are given what they shall carry."""

    def publishing(
        self, transport: str, records: Sequence[Any]
    ) -> AbstractContextManager[Sequence[Any]]:
        """Enclose the publishing of ``OutgoingRecord`` objects; yields the records to publish: a
        record without a trace gets this one.

        :param transport: the alias of the transport.
        """

    def running(
        self, deliveries: Sequence[Any], contexts: Sequence[Any]
    ) -> AbstractContextManager[object]:
        """Enclose a handler's run, in its thread or task: of a ``Delivery`` with a ``JobContext``,
        or of a batch of them.

        Later ``settled`` or ``given_back`` reports how each has ended.
        """

    def failing(self, outcomes: Sequence[Any]) -> None:
        """Called before the failures of these ``Attempt`` objects are written: leaves with their
        records the trace that the next attempt or a replay is to follow."""

    def settled(self, outcomes: Sequence[Any]) -> None:
        """Called when these outcomes are durable."""

    def given_back(self, deliveries: Sequence[Any]) -> None:
        """Called for deliveries that ended without an outcome, run or not: they come again."""


tracer: Tracer | None = None
"""The installed tracer. Read it as ``tracing.tracer``, since ``install`` replaces it."""


def install(wanted: Tracer | None) -> None:
    """Make this the tracer from now on; None removes the present one."""
    global tracer
    tracer = wanted
