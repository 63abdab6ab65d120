"""What the database transport promises of the rows that one ``publish`` writes, many or few."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from kjo_django.exceptions import PublishError
from kjo_django.messages.headers import to_json
from kjo_django.models import TransportMessage
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.database import DatabaseTransport, insertion
from kjo_django.transports.database.subscription import key_hash
from kjo_django.values import MAX_PRIORITY
from tests.clocks import SetClock

EVERY_BYTE = bytes(range(256))
VALUES = [None, b"", b"text", EVERY_BYTE, b"\\x41", b'{"a": "%s"}', b"\\N\t\\."]
NAMES = ["kjo-id", "", "naïve ключ", '"quoted"', "back\\slash", "nul\0", "%s", "😀"]
GROUPS = {"orders": ["shop", 'ledger\'s "own"'], "returns": ["shop"]}


def unlike_records(count: int) -> list[OutgoingRecord]:
    """Return records that differ in everything, now and then from the one before."""
    choose = random.Random(count)
    later = datetime(2031, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    return [
        OutgoingRecord(
            choose.choice(["orders", "returns", "nobody's"]),
            choose.choice(VALUES),
            choose.choice([*VALUES, b"%d" % number]),
            {
                name: choose.choice([b"same", b"", EVERY_BYTE, b"%d" % number])
                for name in choose.sample(NAMES, choose.randrange(len(NAMES)))
            },
            choose.choice([None, later + timedelta(microseconds=number)]),
            priority=choose.choice([0, 0, -MAX_PRIORITY, MAX_PRIORITY, 7]),
        )
        for number in range(count)
    ]


class RowConformance:
    """For each database, with the rows of ``alias``."""

    alias: str
    atomic: Callable[[], AbstractContextManager[Any]]

    @pytest.fixture
    def publisher(self) -> DatabaseTransport:
        TransportMessage.objects.using(self.alias).all().delete()
        transport = DatabaseTransport("test", {"DATABASE": self.alias, "GROUPS": GROUPS})
        transport.clock = SetClock()
        return transport

    def rows(self) -> list[TransportMessage]:
        return list(TransportMessage.objects.using(self.alias).order_by("id"))

    def contents(self) -> list[Any]:
        return [
            (
                *(row.topic, row.consumer_group, _bytes(row.key), row.key_hash, _bytes(row.value)),
                *(row.headers, row.rank, row.published_at, row.available_at),
                *(row.lease_token, row.lease_expires_at),
            )
            for row in self.rows()
        ]

    @pytest.mark.parametrize("count", [1, 2, 19, 20, 60, 1203])
    def test_a_row_for_each_group_has_what_its_record_was_published_with(
        self, publisher: DatabaseTransport, count: int
    ) -> None:
        records, now = unlike_records(count), publisher.clock.now()
        # When
        answers = publisher.publish(records)
        # Then
        assert self.contents() == [
            (
                *(one.topic, group, one.key, None if one.key is None else key_hash(one.key)),
                *(one.value, to_json(one.headers), -one.priority, now, one.available_at or now),
                *("", None),
            )
            for one in records
            for group in GROUPS.get(one.topic, [""])
        ]
        ids, position = [row.pk for row in self.rows()], 0
        for record, answer in zip(records, answers, strict=True):
            assert answer.error is None
            if connections[self.alias].features.can_return_rows_from_bulk_insert:
                assert (answer.partition, answer.offset) == (0, ids[position])
            position += len(GROUPS.get(record.topic, [""]))

    def test_what_is_refused_of_many_keeps_its_place_among_the_answers(
        self, publisher: DatabaseTransport
    ) -> None:
        records = [OutgoingRecord("orders", b"%d" % number) for number in range(40)]
        records[3] = OutgoingRecord("", b"3")
        records[39] = OutgoingRecord("x" * 250, b"39")
        # When
        answers = publisher.publish(records)
        # Then
        assert [number for number, one in enumerate(answers) if one.error] == [3, 39]
        stored = {row.pk: _bytes(row.value) for row in self.rows()}
        assert len(stored) == 38 * 2
        offsets = [one.offset for one in answers if one.offset is not None]
        assert [stored[offset] for offset in offsets] in (
            [record.value for n, record in enumerate(records) if n not in (3, 39)],
            [],
        )

    def test_values_over_the_size_of_a_statement_are_sent_in_several(
        self, publisher: DatabaseTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a limit that two rows reach, and a row beyond it
        monkeypatch.setattr(insertion, "MOST_OF_STATEMENT", 1000)
        values = [bytes([number]) * 450 for number in range(8)]
        values[4] = b"x" * 3000
        publisher.publish([OutgoingRecord("returns", b"groups are read")])
        # When
        with CaptureQueriesContext(connections[self.alias]) as queries:
            publisher.publish([OutgoingRecord("returns", value) for value in values])
        # Then
        inserts = [one["sql"] for one in queries if one["sql"].startswith("INSERT")]
        assert len(inserts) == 5
        assert [_bytes(row.value) for row in self.rows()[1:]] == values

    def test_an_outage_after_the_first_statement_leaves_no_row(
        self, publisher: DatabaseTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given
        monkeypatch.setattr(insertion, "MOST_ROWS", 10)
        inserts = []

        def break_off(execute: Any, sql: str, *arguments: Any) -> Any:
            if sql.startswith("INSERT"):
                inserts.append(sql)
                if len(inserts) == 3:
                    raise OperationalError("gone away")
            return execute(sql, *arguments)

        # When
        records = [OutgoingRecord("returns", b"%d" % number) for number in range(50)]
        with (
            connections[self.alias].execute_wrapper(break_off),
            pytest.raises(PublishError, match="refused the records: gone away"),
        ):
            publisher.publish(records)
        # Then
        assert (len(inserts), self.rows()) == (3, [])
        assert len(publisher.publish(records)) == len(self.rows()) == 50

    @pytest.mark.parametrize("count", [1, 50])
    def test_rows_of_an_open_transaction_are_undone_with_it(
        self, publisher: DatabaseTransport, count: int
    ) -> None:
        records = [OutgoingRecord("returns", b"%d" % number) for number in range(count)]
        with pytest.raises(ZeroDivisionError), self.atomic():
            publisher.publish(records)
            assert len(self.rows()) == count
            raise ZeroDivisionError
        assert self.rows() == []


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(cast(Sequence[int], value))
