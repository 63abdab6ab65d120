"""PJQ-65: the memory transport passes the suite of every transport."""

from typing import cast

from kjo_django.testing.conformance import TransportConformance
from kjo_django.transports.base import Subscription
from kjo_django.transports.memory import MemoryTransport
from kjo_django.transports.memory.transport import MemorySubscription


class TestMemory(TransportConformance):
    quiet = 0.1

    def make_transport(self) -> MemoryTransport:
        return MemoryTransport("test", {})

    def abandon(self, subscription: Subscription) -> None:
        cast("MemorySubscription", subscription).crash()
