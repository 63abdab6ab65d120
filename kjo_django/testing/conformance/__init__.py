"""The suite every transport passes; run it against your own.

    class TestMyTransport(TransportConformance):
        def make_transport(self):
            return MyTransport("test", {...})

Declared capabilities choose the cases. Needs pytest, and no server of its own. ``suite`` tells what
can be adjusted; each other module holds the tests of one promise.
"""

from __future__ import annotations

import pkgutil

import pytest

# Before they are imported: then what fails shows its values, as in a test of one's own.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
)

from kjo_django.testing.conformance.acknowledging import Acknowledging  # noqa: E402
from kjo_django.testing.conformance.closing import Closing  # noqa: E402
from kjo_django.testing.conformance.groups import Groups  # noqa: E402
from kjo_django.testing.conformance.pausing import Pausing  # noqa: E402
from kjo_django.testing.conformance.polling import Polling  # noqa: E402
from kjo_django.testing.conformance.publishing import EVERY_BYTE, Publishing, name_bytes  # noqa: E402
from kjo_django.testing.conformance.rebalancing import Rebalancing  # noqa: E402
from kjo_django.testing.conformance.suite import values  # noqa: E402
from kjo_django.testing.conformance.telling import Telling  # noqa: E402
from kjo_django.testing.conformance.waiting import eventually  # noqa: E402


class TransportConformance(
    Publishing, Groups, Acknowledging, Rebalancing, Polling, Pausing, Closing, Telling
):
    """Subclass it, implement ``make_transport`` and adjust the attributes that do not fit."""


__all__ = ["EVERY_BYTE", "TransportConformance", "eventually", "name_bytes", "values"]
