"""The grammar of searches: what is read is written again, and what cannot be read says why."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.operations.search import JobFilter, parse
from kjo_django.states import JobStatus

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def test_every_qualifier_is_read():
    found = parse(
        'queue:emails handler:shop.send_* state:failed error:"rate limit" key:42 attempts:3 '
        f'unique:order-7 id:{ID} args.order.id:17 args.note:"a b" since:2h '
        "until:2026-01-01T00:00Z refund"
    )
    assert found == JobFilter(
        ids=(ID,),
        state="failed",
        queue="emails",
        handler="shop.send_*",
        key="42",
        unique_id="order-7",
        error="rate limit",
        attempts=3,
        since=timedelta(hours=2),
        until=datetime(2026, 1, 1, tzinfo=UTC),
        arguments=(("order.id", "17"), ("note", "a b")),
        words=("refund",),
    )


def test_nothing_looks_for_everything():
    assert parse("  ").is_empty
    assert str(JobFilter()) == ""


def test_other_names_for_two_qualifiers():
    assert parse("task:a status:failed") == JobFilter(handler="a", state="failed")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("handlr:a", "There is no handlr: to search by; did you mean handler:?"),
        ("xyzzy:a", "known are id, state, queue"),
        ("http://a", "quote it"),
        ("state:faild", "'faild' is not a state; did you mean failed?"),
        ("id:7", "id: takes ids of jobs, not '7'"),
        ("attempts:-1", "attempts: takes a whole number"),
        ("attempts:\N{SUPERSCRIPT TWO}", "attempts: takes a whole number"),
        ("since:yesterday", "since: takes a time such as"),
        ("until:0001-01-01", "until: takes a time such as"),
        ("until:2026-02-31", "until: takes a time such as"),
        ("since:999999999w", "since: takes a time such as"),
        ("queue: emails", "queue: needs a value"),
        ("queue:a queue:b", "queue: is given twice"),
        ('error:"open', "A quote is not closed"),
        ('"a"b', "A quote is not closed, or text follows it"),
        ("args.:7", "takes the name of a field"),
        ("args.a..b:7", "takes the name of a field"),
        ("args.user.Password:7", "is a secret"),
        ("queue:" + "a" * 256, "takes text of 1 to 255"),
        ("a" * 40_001, "at most 40,000 characters"),
        ("queue:a\0b", "a character that no database keeps"),
        ("a\0b", "a character that no database keeps"),
        ("args.a:\ud800", "a character that no database keeps"),
        ("a " * 101, "at most 100 words"),
        ("args.a:1 " * 101, "at most 100 words"),
    ],
)
def test_what_cannot_be_read_says_why(text, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parse(text)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_SOME = _TEXT.filter(bool)
_PATH = st.from_regex(r"\A[a-z][a-z0-9]{0,5}(\.[a-z0-9]{1,5}){0,2}\Z").filter(
    lambda path: "token" not in path
)
_MOMENTS = st.one_of(
    st.none(),
    st.integers(0, 10**6).map(lambda seconds: timedelta(seconds=seconds)),
    st.datetimes(
        datetime(1980, 1, 1),
        datetime(2100, 1, 1),
        timezones=st.just(UTC),
    ),
)


@given(
    st.builds(
        JobFilter,
        ids=st.lists(st.uuids(), max_size=3).map(tuple),
        state=st.none() | st.sampled_from(JobStatus.values),
        queue=st.none() | _SOME,
        handler=st.none() | _SOME,
        error=st.none() | _SOME,
        attempts=st.none() | st.integers(0, 10**8),
        since=_MOMENTS,
        until=_MOMENTS,
        arguments=st.lists(st.tuples(_PATH, _TEXT), max_size=2).map(tuple),
        words=st.lists(_TEXT, max_size=3).map(tuple),
    )
)
def test_what_is_written_reads_as_the_same(found):
    assert parse(str(found)) == found


@given(_TEXT)
def test_no_text_does_anything_but_be_read_or_refused(text):
    try:
        assert parse(str(parse(text))) == parse(text)
    except ValueError as error:
        assert str(error)


def test_so_long_ago_can_be_made_a_time():
    now = datetime(2026, 1, 2, tzinfo=UTC)
    frozen = parse("since:1d until:2026-01-05").at(now)
    assert frozen.since == datetime(2026, 1, 1, tzinfo=UTC)
    assert parse(str(frozen)) == frozen
