"""Jobs of our own, found in every process as those of any app are.

They are kept apart from the project's: they declare no queue, and no list of handlers names them.
"""

from __future__ import annotations

from datetime import timedelta

from kjo_django import registry
from kjo_django.operations import bulk
from kjo_django.operations.internal import InternalHandler
from kjo_django.patterns.kdlq import letters  # noqa: F401 - registers its format of dead letters
from kjo_django.personal_data import erasure

LONGEST_RUN = timedelta(days=7)


for _name in (bulk.REPLAY, bulk.DISCARD, bulk.CHANGE, erasure.ERASE):
    _options = registry.HandlerOptions(
        name=_name,
        atomic=False,
        takes_context=True,
        timeout=LONGEST_RUN,
        result_ttl=LONGEST_RUN,
        max_attempts=20,
    )
    _module = erasure if _name == erasure.ERASE else bulk
    _handler = InternalHandler(_module.carry_out, _options, _module.permission_of)
    registry.register(_handler, is_own=True)
