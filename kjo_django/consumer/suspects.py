"""Who runs with whom after a crash.

What was being run when a worker died is suspect, and runs apart from all others. Mostly none of
many is guilty, so those that can afford it share their second run with a few: as many as there are
bunches, so that neither a guilty one's bunch nor the number of bunches is large. If the worker dies
again, each of the bunch is on its own from then on.

An innocent job loses two attempts at most in this way, and never one of its last two: it shares
none that would leave it fewer, and alone it loses none to others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kjo_django.conf import get_settings
from kjo_django.consumer.attempts import spent_and_limit
from kjo_django.consumer.rows import load_rows, row_id
from kjo_django.consumer.work import Delivery
from kjo_django.producer.dispatch import jobs_database

SECOND = 2
"""Which run of a suspect may be shared: the first is what made it one."""
SPARE = 2
"""Attempts a job must have left should it lose the one it shares."""


def rounds_of(apart: Sequence[Delivery], begun: Mapping[Delivery, int]) -> list[list[Delivery]]:
    """Arrange what runs apart: who is in one round runs together, a key has one in a round and its
    next in a later one.

    :param apart: suspects, and those that come after one of their key.
    :param begun: the suspects among them, and as the how manieth time each is begun now.
    """
    sharing = _sharing([d for d in apart if begun.get(d) == SECOND])
    size = math.isqrt(len(sharing))
    rounds: list[list[Delivery]] = []
    last: dict[object, int] = {}
    shared = -1
    for delivery in apart:
        can_share = delivery in sharing
        if can_share and last.get(delivery.shard, -1) < shared and len(rounds[shared]) < size:
            rounds[shared].append(delivery)
            last[delivery.shard] = shared
            continue
        last[delivery.shard] = len(rounds)
        if can_share:
            shared = len(rounds)
        rounds.append([delivery])
    return rounds


def _sharing(suspects: Sequence[Delivery]) -> set[Delivery]:
    if len(suspects) < 4:  # two rounds of two are the least that saves one
        return set()
    rows, service = load_rows(jobs_database(), suspects, lock=False), get_settings().service_name
    return {d for d in suspects if _has_spare(d, rows.get(row_id(d, service)))}


def _has_spare(delivery: Delivery, row: dict[str, object] | None) -> bool:
    spent, limit = spent_and_limit(delivery, row)
    return spent + SECOND + SPARE <= limit
