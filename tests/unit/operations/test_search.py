"""Finding jobs: what fits, page by page, within bounds."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.coordination.base import alive_name, lease_name
from kjo_django.ids import uuid7_floor
from kjo_django.models import ORIGIN_ID, Job
from kjo_django.operations import search
from kjo_django.operations.search import JobFilter, find, page, parse
from kjo_django.runtime import get_coordination
from tests.factories import JobFactory
from tests.running_jobs import MINUTE, let_run
from tests.unit.deliveries import as_job

pytestmark = pytest.mark.django_db
NOW = timezone.now()
LATER = NOW + timedelta(hours=2)


@pytest.fixture(autouse=True)
def _configured(settings, forgotten_definitions):
    settings.KJO = {**settings.KJO, "QUEUES": {"emails": {}, "images": {}}}


def found(text: str) -> set[str]:
    """The errors, as names, of the jobs found; by a page and by walking alike."""
    rows = page(parse(text)).rows
    assert {job.pk for job in rows} == set(find(parse(text)).values_list("pk", flat=True))
    return {job.unique_id or "" for job in rows}


def named(name: str, **columns) -> Job:
    return JobFactory(unique_id=name, **{"queue": "emails", **columns})


def test_each_qualifier_restricts():
    # Given
    a = named("a", handler="shop.send", key="42", state="failing", attempts=2, error="Rate limit 9")
    named("b", queue="images", handler="shop.resize", failed=True)
    # Then
    assert found("queue:emails") == {"a"}
    assert found("handler:shop.send") == {"a"}
    assert found("handler:shop.*") == {"a", "b"}
    assert found("key:42") == {"a"}
    assert found("state:failed") == {"b"}
    assert found("attempts:3") == {"b"}
    assert found('error:"rate LIMIT"') == {"a"}
    assert found(f"id:{a.pk}") == {"a"}
    assert found("unique:b") == {"b"}
    assert found("unique:b queue:emails") == set()
    assert found("unique:a*") == {"a"}
    assert found("resize") == {"b"}
    assert found("42 rate") == {"a"}
    assert found(str(a.pk)) == {"a"}
    assert found("nothing") == set()
    assert found("") == {"a", "b"}


def test_the_time_of_creation_is_in_the_key():
    # Given
    for name, age in (("old", 3), ("new", 1)):
        id = uuid7_floor(NOW - timedelta(hours=age))
        named(name, id=id, created_at=NOW - timedelta(hours=age))
    # Then
    assert found("since:2h") == {"new"}
    assert found("until:2h") == {"old"}
    assert found("since:4h until:2h") == {"old"}


def test_the_states_people_are_shown_exclude_one_another():
    # Given
    named("pending")
    named("scheduled", available_at=LATER)
    named("scheduled-too", queued=True, available_at=LATER)
    named("queued", queued=True)
    named("failing", state="failing", attempts=1, available_at=LATER)
    named("completed", completed=True)
    # Then
    assert found("state:pending") == {"pending"}
    assert found("state:scheduled") == {"scheduled", "scheduled-too"}
    assert found("state:queued") == {"queued"}
    assert found("state:failing") == {"failing"}
    assert found("state:completed") == {"completed"}


def test_what_living_workers_hold_is_processing():
    # Given
    running, forgotten = named("running", queued=True), named("forgotten", queued=True)
    named("waiting", queued=True)
    let_run(running)
    let_run(forgotten, worker="dead", is_alive=False)
    let_run(JobFactory.build(queue="emails", headers={ORIGIN_ID: "some message of others"}))
    # Then
    assert found("state:processing") == {"running"}


def test_steps_that_a_worker_has_released_to_itself_are_processing():
    """They come to it past the transport, under leases of coordination."""
    step, queue = named("step", queued=True), get_settings().queue("emails")
    get_coordination().claim([lease_name(queue, step.message_id)], "living", MINUTE)
    get_coordination().claim([alive_name("living")], "living", MINUTE)
    assert found("state:processing") == {"step"}


# --- Payloads -------------------------------------------------------------------------------------


def test_values_in_payloads_are_found_by_their_path():
    # Given
    for name, payload in {
        "a": {"order_id": 17, "order": {"lines": [{"sku": "x"}, {"sku": "y"}]}, "paid": True},
        "b": {"order_id": "17", "paid": None},
        "c": [1, 2],
    }.items():
        named(name, payload=json.dumps(payload).encode())
    named("d", payload=b"\xff not json")
    # Then
    assert found("args.order_id:17") == {"a", "b"}
    assert found("args.order.lines.sku:y") == {"a"}
    assert found("args.order.lines.0.sku:y") == set()
    assert found("args.paid:true") == {"a"}
    assert found("args.paid:null") == {"b"}
    assert found("args.order_id:17 unique:b") == {"b"}


def test_what_nobody_is_shown_is_not_found_either():
    # Given a handler that hides a field
    as_job(lambda iban: None, "tests.pay", redact=("iban",))
    as_job(lambda iban: None, "tests.other")
    named("a", handler="tests.pay", payload=b'{"iban": "DE00"}')
    named("b", handler="tests.other", payload=b'{"iban": "DE00"}')
    named("c", handler="tests.renamed", payload=b'{"iban": "DE00"}')
    # Then
    assert found("args.iban:DE00") == {"b"}


def test_no_secret_is_guessed_by_what_holds_it():
    named("a", payload=b'{"card": {"pin": 7, "password": "x"}, "cards": [[{"password": "x"}]]}')
    assert found("args.card.pin:7") == {"a"}
    assert found("args.card:\"{'pin': 7, 'password': 'x'}\"") == set()
    assert found("args.cards:\"[{'password': 'x'}]\"") == set()


def test_payloads_are_looked_into_as_far_as_the_bound(monkeypatch):
    # Given
    monkeypatch.setattr(search, "PAYLOADS", 2)
    jobs = [named(name, payload=b'{"n": 1}') for name in "abc"]
    # Then
    looked = page(parse("args.n:1"))
    assert [job.unique_id for job in looked.rows] == ["c", "b"]
    assert looked.is_windowed
    # And long ones are not read at all
    monkeypatch.setattr(search, "PAYLOADS", 3)
    monkeypatch.setattr(search, "LARGEST_PAYLOAD", 8)
    Job.objects.filter(pk=jobs[2].pk).update(payload=b'{"n": 1, "long": 2}')
    looked = page(parse("args.n:1"))
    assert [job.unique_id for job in looked.rows] == ["b", "a"]
    assert looked.is_windowed


# --- Bounds ---------------------------------------------------------------------------------------


def test_what_no_index_serves_is_looked_for_among_the_newest(monkeypatch):
    # Given
    for number in range(6):
        named(f"n{number}", key=str(number % 2), state="failed" if number < 3 else "pending")
    monkeypatch.setattr(search, "WINDOW", 3)
    # Then
    assert found("key:0") == {"n4"}
    assert page(parse("key:0")).is_windowed
    # And in the newest of an indexed state
    assert found("key:0 state:failed") == {"n0", "n2"}
    assert not page(parse("key:0 state:failed")).is_windowed
    # But not where an index serves
    assert len(found("")) == 6
    assert len(found("state:failed")) == 3
    assert found("key:0 unique:n0") == {"n0"}
    assert not page(parse("key:0 unique:n0")).is_windowed


def test_the_number_of_queries_does_not_grow_with_the_jobs(django_assert_max_num_queries):
    for number in range(20):
        named(f"n{number}", state="queued" if number % 2 else "failed")
    with django_assert_max_num_queries(2):
        page(parse("state:failed handler:tests.add"))


# --- Pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "state:pending", "state:scheduled", "key:k"])
def test_pages_follow_one_another_forth_and_back(text):
    # Given
    due = LATER if "scheduled" in text else NOW
    names = [f"n{number}" for number in range(7)]
    for number, name in enumerate(names):
        queued = {"queued": True} if "scheduled" in text and number % 2 else {}
        named(name, key="k", available_at=due, **queued)
    # When going forth
    seen, there = [], page(parse(text), size=3)
    pages = [there]
    assert there.previous is None
    while there.next is not None:
        there = page(parse(text), after=there.next, size=3)
        pages.append(there)
    seen = [job.unique_id for each in pages for job in each.rows]
    # Then each is seen once
    assert seen == names[::-1]
    assert [len(each.rows) for each in pages] == [3, 3, 1]
    # And back
    back = page(parse(text), before=there.previous, size=3)
    assert [job.unique_id for job in back.rows] == ["n3", "n2", "n1"]
    first = page(parse(text), before=back.previous, size=3)
    assert [job.unique_id for job in first.rows] == ["n6", "n5", "n4"]
    assert first.previous is None
    assert first.next is not None


def test_a_new_job_is_on_the_page_before_and_moves_no_other():
    for name in "abcd":
        named(name)
    second = page(after=page(size=2).next, size=2)
    named("e")
    assert [job.unique_id for job in second.rows] == ["b", "a"]
    assert [job.unique_id for job in page(before=second.previous, size=2).rows] == ["d", "c"]


@pytest.mark.parametrize("cursor", ["", "x", "=" * 22, "a" * 21, "é" * 22, "/" * 22])
def test_a_cursor_nobody_gave_is_refused(cursor):
    with pytest.raises(ValueError, match="not a place"):
        page(after=cursor)


def test_one_direction_and_a_size_in_bounds():
    with pytest.raises(ValueError, match="not both"):
        page(JobFilter(), after="a", before="b")
    with pytest.raises(ValueError, match="1 to 500"):
        page(size=501)


def test_rows_come_without_payload_and_result():
    named("a")
    assert page().rows[0].get_deferred_fields() == {"payload", "result"}


def test_as_many_words_as_a_search_may_have_are_looked_for():
    """SQLite takes a thousand levels of conditions, each word is one."""
    assert search.page(search.parse("word " * 100)).rows == []
