"""A subscription ends without harm, whenever it is closed."""

from __future__ import annotations

from kjo_django.testing.conformance.suite import Suite, values
from kjo_django.transports.base import Transport


class Closing(Suite):
    """Closing twice, and before the first poll."""

    def test_closing_twice_is_fine_and_the_transport_lives_on(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1")
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        subscription.close()
        subscription.close()
        transport.close()
        transport.close()

        self.publish_values(transport, topic, b"2")

        assert values(self.read(self.subscribe(transport, topic, group), 2)) == [b"1", b"2"]

    def test_closing_before_the_first_poll_is_fine(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        subscription = self.subscribe(transport, topic, group)
        subscription.flush()
        subscription.close()
        assert subscription.poll(10, 0) == []
