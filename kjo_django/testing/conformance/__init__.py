"""The suite every transport passes; run it against your own.

    class TestMyTransport(TransportConformance):
        def make_transport(self):
            return MyTransport("test", {...})

Declared capabilities choose the cases. Needs pytest, and no server of its own. ``suite`` tells what
can be adjusted; each other module holds the tests of one promise.
"""

from __future__ import annotations

from kjo_django.testing.conformance.acknowledging import Acknowledging
from kjo_django.testing.conformance.closing import Closing
from kjo_django.testing.conformance.groups import Groups
from kjo_django.testing.conformance.pausing import Pausing
from kjo_django.testing.conformance.polling import Polling
from kjo_django.testing.conformance.publishing import EVERY_BYTE, Publishing, name_bytes
from kjo_django.testing.conformance.rebalancing import Rebalancing
from kjo_django.testing.conformance.suite import values
from kjo_django.testing.conformance.telling import Telling
from kjo_django.testing.conformance.waiting import eventually


class TransportConformance(
    Publishing, Groups, Acknowledging, Rebalancing, Polling, Pausing, Closing, Telling
):
    """Subclass it, implement ``make_transport`` and adjust the attributes that do not fit."""


__all__ = ["EVERY_BYTE", "TransportConformance", "eventually", "name_bytes", "values"]
