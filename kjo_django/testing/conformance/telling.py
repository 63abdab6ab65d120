"""What a subscription and a transport tell of how they do."""

from __future__ import annotations

import pytest

from kjo_django.testing.conformance.suite import Suite
from kjo_django.testing.conformance.waiting import eventually
from kjo_django.transports.base import Transport


class Telling(Suite):
    """Lag, errors and the probe."""

    def test_lag_falls_as_records_are_acknowledged(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        subscription = self.subscribe(transport, topic, group)
        records = self.read(subscription, 3)
        if subscription.lag() is None:
            pytest.skip("does not know its lag")

        def lag() -> int:
            assert subscription.poll(0, 0.02) == []
            return sum((subscription.lag() or {}).values())

        eventually(lambda: lag() == 3, self.within, "a lag of 3")
        self.settle(subscription, records[:2])
        eventually(lambda: lag() == 1, self.within, "a lag of 1")
        self.settle(subscription, records[2:])
        eventually(lambda: lag() == 0, self.within, "no lag")

    def test_offsets_agree_with_the_lag(self, transport: Transport, topic: str, group: str) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        subscription = self.subscribe(transport, topic, group)
        self.settle(subscription, self.read(subscription, 3)[:2])

        def agreed() -> bool:
            assert subscription.poll(0, 0.02) == []
            offsets = transport.offsets([topic], group)
            if not offsets:
                pytest.skip("does not know its lag")
            assert all(
                each.committed is None or each.end - each.committed == each.lag
                for each in offsets.values()
                if each.end is not None
            )
            lags = {where: each.lag for where, each in offsets.items()}
            return sum(lags.values()) == 1 and lags == transport.lag([topic], group)

        eventually(agreed, self.within, "a lag of 1, however it is asked for")

    def test_a_healthy_subscription_reports_no_error(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1")
        subscription = self.subscribe(transport, topic, group)
        self.read(subscription, 1)

        assert subscription.last_error is None

    def test_a_reachable_transport_answers_a_probe(self, transport: Transport) -> None:
        assert transport.probe(10.0)
