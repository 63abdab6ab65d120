"""How long a message keeps its place and its attempts while errors pause its partition.

The moment of a message's first pause is a mark in coordination, which foreign messages can have as
well as jobs with a row, and which outlives the worker. Where it is lost the time begins anew.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.utils import timezone

from kjo_django.backends import get_coordination
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Delivery, Outcome
from kjo_django.exceptions import CoordinationError

logger = logging.getLogger("kjo_django")

KEPT_BEYOND = timedelta(days=7)
"""How long the moment is remembered after the budget is used up: time for the attempts left."""


def keeps_place(outcome: Outcome) -> bool:
    """Return whether a failed attempt that pauses its partition leaves its message where it is, its
    attempt unspent: for ``KJO["PAUSE_BUDGET"]`` from the message's first pause on."""
    if outcome.pause_seconds is None or outcome.delivery.message is None:
        return False
    conf, now = get_settings(), timezone.now()
    began_at = _began_at(outcome.delivery, now, conf.pause_budget + KEPT_BEYOND)
    if now - began_at >= conf.pause_budget:
        return False
    # An error of no class in particular has no delay of its own.
    outcome.pause_seconds = outcome.pause_seconds or conf.backoff_base.total_seconds()
    return True


def _began_at(delivery: Delivery, now: datetime, ttl: timedelta) -> datetime:
    """Return when the message was paused first: now, if it never was."""
    if delivery.paused_since is None:
        message = delivery.message
        assert message is not None
        name = f"PAUSED:{delivery.queue.key_prefix}:{message.id}"
        delivery.paused_since = now
        try:
            found = get_coordination().get_marks([name]).get(name)
            if found is None:
                get_coordination().set_marks({name: now.isoformat()}, ttl)
            else:
                delivery.paused_since = datetime.fromisoformat(found)
        except (CoordinationError, ValueError) as error:
            logger.warning("When %s was paused first is known to this worker only: %s", name, error)
    return delivery.paused_since
