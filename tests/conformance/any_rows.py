"""Rows of the message table, of every kind."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

from kjo_django.models import TransportMessage
from kjo_django.transports.database.subscription import key_hash


def any_row(
    draw: random.Random, topic: str, now: datetime, *, group: str = "g", mine: str, theirs: str
) -> TransportMessage:
    """Return a row with any priority, key and value, due or not, in flight or not.

    :param mine: the token of one consumer.
    :param theirs: the token of another one.
    """
    key = draw.choice((None, b"k1", b"k2", b"%d" % draw.randint(0, 99)))
    whose = draw.choice(("", "", "", "", mine, theirs))
    ends = now + timedelta(seconds=draw.choice((-60, 60)))
    return TransportMessage(
        topic=topic,
        consumer_group=group,
        key=key,
        key_hash=None if key is None else key_hash(key),
        value=draw.choice((None, b"", b"x" * draw.randint(1, 3000))),
        headers=draw.choice(({}, {"kjo-id": "eA=="}, {"\u00e9": "w6k=", "b": ""})),
        rank=draw.randint(-2, 2),
        available_at=now + timedelta(seconds=draw.choice((-9, -1, 60))),
        deliveries=draw.choice((0, 0, 3)),
        lease_token=whose,
        lease_expires_at=ends if whose else None,
    )
