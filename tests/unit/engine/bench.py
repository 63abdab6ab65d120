"""What these tests ask of a worker driven by hand."""

from __future__ import annotations

import pytest

from kjo_django.runtime import get_coordination
from tests.unit.deliveries import Bench

both = pytest.mark.usefixtures("real_database")
GOOD = {"kjo_id": "foreign-1", "kjo_type": "ledger.write"}
"""Headers of a message of another service that a handler here takes."""


def reconfigured(settings, bench: Bench, **keys: object) -> Bench:
    """The same worker under other settings, made anew: changing them makes new transports. Its
    fixture closes it."""
    bench.close()
    settings.KJO = {**settings.KJO, **keys}
    bench.__init__()  # type: ignore[misc]
    return bench


def settled(bench: Bench) -> bool:
    """Whether nothing is left to do, nobody holds a lease and no outage was suspected."""
    return (
        bench.lag() == 0
        and not list(get_coordination().names("CONS:"))
        and not bench.stopping.waits
    )
