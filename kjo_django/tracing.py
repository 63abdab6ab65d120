"""Where tracing plugs in: what producers, the relay and workers tell a tracer, if there is one.

Nothing here knows OpenTelemetry. ``kjo_django.contrib.opentelemetry`` installs a tracer; without it
each place costs one ``is None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Tracer(Protocol):
    """What is told of a job's way. No method raises: a trace is no reason for a job to fail.

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
        """Enclose the publishing of ``OutgoingRecord`` objects; gives those to publish: one without
        a trace of its own is given this one.

        :param transport: the alias of the transport.
        """

    def running(
        self, deliveries: Sequence[Any], contexts: Sequence[Any]
    ) -> AbstractContextManager[object]:
        """Enclose a handler's run, in its thread or task: of a ``Delivery`` with a ``JobContext``,
        or of a batch of them.

        What each ends with is told later, by ``settled`` or ``given_back``.
        """

    def failing(self, outcomes: Sequence[Any]) -> None:
        """The failures of these ``Attempt`` objects are about to be written: leave with their
        records what the next attempt or a replay is to follow."""

    def settled(self, outcomes: Sequence[Any]) -> None:
        """These outcomes are durable."""

    def given_back(self, deliveries: Sequence[Any]) -> None:
        """These deliveries, run or not, ended without an outcome: they come again."""


tracer: Tracer | None = None
"""The one that is told. Read it as ``tracing.tracer``; ``install`` replaces it."""


def install(wanted: Tracer | None) -> None:
    """Tell this tracer from now on; None tells nobody."""
    global tracer
    tracer = wanted
