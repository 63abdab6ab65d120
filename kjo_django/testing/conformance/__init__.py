"""The suite every transport passes; run it against your own.

    class TestMyTransport(TransportConformance):
        def make_transport(self):
            return MyTransport("test", {...})

Declared capabilities choose the cases. Needs pytest, and no server of its own. What can be
adjusted is in ``suite``; each other module holds the tests of one kind of promise.
"""

from __future__ import annotations

import pkgutil

import pytest

# Before they are imported: then what fails shows its values, as in a test of one's own.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
)

from kjo_django.testing.conformance.consuming import Consuming  # noqa: E402
from kjo_django.testing.conformance.groups import Groups  # noqa: E402
from kjo_django.testing.conformance.publishing import EVERY_BYTE, Publishing, name_bytes  # noqa: E402
from kjo_django.testing.conformance.suite import eventually, values  # noqa: E402


class TransportConformance(Publishing, Groups, Consuming):
    """Subclass it, implement ``make_transport``, and adjust attributes where the defaults do not
    fit.
    """


__all__ = ["EVERY_BYTE", "TransportConformance", "eventually", "name_bytes", "values"]
