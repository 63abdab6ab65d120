"""The texts that find what a consumer may claim have the meaning of a query of Django's.

In the default tier on SQLite and PostgreSQL: a text that finds too much lets a key overtake itself,
and one that finds too little lets a job wait for ever.
"""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.models import TransportMessage
from kjo_django.transports.database.claims import FIRST_RANK, LAST_RANK, Asked
from kjo_django.transports.database.due_rows import DueRow, DueRows
from kjo_django.transports.database.subscription import key_hash
from tests.conformance.any_rows import any_row
from tests.conformance.databases import SQLITE
from tests.conformance.due_by_orm import due_by_orm

TOPICS = ("t", "u", "v", "w")


@pytest.mark.parametrize("seed", range(8))
def test_the_texts_find_what_a_query_of_djangos_finds(alias: str, seed: int) -> None:
    draw = random.Random(seed)
    now = timezone.now()
    topics = TOPICS[: draw.randint(1, 4)]
    TransportMessage.objects.using(alias).bulk_create(
        any_row(draw, draw.choice(topics), now, group=draw.choice("ggh"), mine="me", theirs="other")
        for _ in range(draw.choice((20, 200)))
    )
    skipped = {topic: {key_hash(b"k1"), 7} for topic in topics if draw.random() < 0.5}
    asked = {topic: _any_part(draw, topic) for topic in topics}
    small = draw.choice((0, 100, 10_000))
    rows = DueRows(alias, "g", "me")
    # When
    found = dict(rows.read(asked, skipped, now, small))
    due = rows.due_topics([one for own in asked.values() for one in own], skipped, now)
    # Then
    expected = {
        topic: [
            row
            for one in own
            for row in due_by_orm(alias, "g", "me", one, skipped.get(topic, ()), now)[: one.most]
        ]
        for topic, own in asked.items()
    }
    for topic, own in expected.items():
        # The parts of a union may come in any order
        read = sorted(found[topic], key=lambda row: [each.id for each in own].index(row.id))
        assert read == [_read(row, small) for row in own]
        if len(asked[topic]) == 1:
            assert read == found[topic], "in their order"
    assert due == {topic for topic, own in expected.items() if own}


def _any_part(draw: random.Random, topic: str) -> list[Asked]:
    most, rank = draw.choice((1, 5, 50)), draw.randint(-2, 2)
    return draw.choice(
        (
            [Asked(topic, most)],
            [Asked(topic, most, below=rank)],
            [Asked(topic, most, above=rank), Asked(topic, most, below=rank + 1)],
        )
    )


def _read(row: TransportMessage, small: int) -> DueRow:
    size = None if row.value is None else len(row.value)
    return DueRow(
        id=row.pk,
        topic=row.topic,
        key=None if row.key is None else bytes(row.key),
        small_value=None if size is None or size > small else bytes(row.value),
        headers=row.headers,
        published_at=row.published_at,
        rank=row.rank,
        deliveries=row.deliveries,
        lease_token=row.lease_token,
        size=size,
    )


def test_a_value_comes_along_up_to_the_length_that_is_asked_for(alias: str) -> None:
    now = timezone.now()
    for value in (None, b"", b"12", b"123"):
        TransportMessage.objects.using(alias).create(topic="t", consumer_group="g", value=value)
    rows = DueRows(alias, "g", "me")
    ((_, found),) = rows.read({"t": [Asked("t", 9)]}, {}, now + timedelta(seconds=9), 2)
    assert [(row.small_value, row.size) for row in found] == [
        *((None, None), (b"", 0), (b"12", 2), (None, 3))
    ]


def test_keys_in_flight_are_found_by_the_partial_index(sqlite_alias: str) -> None:
    """SQLite would read all that waits of the topic, for each look and each claim."""
    connection = connections[sqlite_alias]
    with CaptureQueriesContext(connection) as queries:
        DueRows(sqlite_alias, "g", "me").due_topics([Asked("t", 1)], {}, timezone.now())
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {queries[0]['sql']}")
        steps = " ".join(step for *_, step in cursor.fetchall())
    assert "kjo_message_rank_idx (topic=? AND consumer_group=?)" in steps
    assert "USING INDEX kjo_message_lease_idx" in steps


def test_bounds_of_ranks_that_leave_nothing_out_are_not_asked(alias: str) -> None:
    """MariaDB would take the range of them for more rows than the topic has."""
    with CaptureQueriesContext(connections[alias]) as queries:
        DueRows(alias, "g", "me").due_topics([Asked("t", 1)], {}, timezone.now())
        DueRows(alias, "g", "me").due_topics([Asked("t", 1, above=1)], {}, timezone.now())
    without, with_bound = [query["sql"] for query in queries]
    assert str(FIRST_RANK) not in without and str(LAST_RANK) not in without
    assert "> 1" in with_bound and str(LAST_RANK) not in with_bound


def test_a_look_at_several_topics_is_one_query_where_parts_of_a_union_have_limits(
    alias: str,
) -> None:
    topics = [Asked(topic, 1) for topic in TOPICS]
    with CaptureQueriesContext(connections[alias]) as queries:
        DueRows(alias, "g", "me").due_topics(topics, {}, timezone.now() + timedelta(seconds=1))
    assert len(queries) == (len(topics) if alias == SQLITE else 1)
