"""Jobs of our own, found in every process as those of any app are.

They are kept apart from the project's: they declare no queue, and no list of handlers names them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from kjo_django import registry
from kjo_django.operations import bulk
from kjo_django.operations.internal import InternalHandler

LONGEST_RUN = timedelta(days=7)


def _register(name: str, function: Callable[..., Any]) -> None:
    options = registry.HandlerOptions(
        name=name,
        atomic=False,
        takes_context=True,
        timeout=LONGEST_RUN,
        result_ttl=LONGEST_RUN,
        max_attempts=20,
    )
    registry.register(InternalHandler(function, options), is_own=True)


_register(bulk.REPLAY, bulk.replay_dead_letters)
_register(bulk.DISCARD, bulk.discard_dead_letters)
_register(bulk.CHANGE, bulk.change_jobs)
