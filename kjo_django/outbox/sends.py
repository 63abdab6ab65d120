"""Publishing so that a tracer, if there is one, is told."""

from __future__ import annotations

from collections.abc import Sequence

from kjo_django import tracing
from kjo_django.transports.base import OutgoingRecord, Published, Transport


def publish(transport: Transport, records: Sequence[OutgoingRecord]) -> list[Published]:
    """``transport.publish``, traced."""
    if tracing.tracer is None:
        return transport.publish(records)
    with tracing.tracer.publishing(transport.alias, records) as traced:
        return transport.publish(traced)
