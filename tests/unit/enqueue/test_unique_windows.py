"""Once in a window of time, or once it has been quiet."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django import enqueue_on_save, job, registry
from kjo_django.exceptions import JobExistsError
from kjo_django.messages import headers as names
from kjo_django.models import Job
from kjo_django.operations.jobs import cancel_one, requeue
from kjo_django.testing import drain
from tests.ledger.jobs import write, write_keyed
from tests.ledger.models import Entry
from tests.running_jobs import let_run
from tests.unit.enqueue.stored import messages, writing_nothing
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
MOMENT = datetime(2030, 1, 1, tzinfo=UTC)
hourly = write.using(unique_for=HOUR, unique_by=("job",))
latest = write.using(debounce=MINUTE, unique_by=("job",))


def begin_earlier(by: timedelta) -> None:
    """Have all jobs stored and due so much earlier."""
    for stored in Job.objects.all():
        stored.created_at -= by
        stored.available_at -= by
        stored.save(update_fields=["created_at", "available_at"])


def notes() -> list[str]:
    return [stored.arguments["note"] for stored in Job.objects.order_by("id")]


# --- Windows --------------------------------------------------------------------------------------


@pytest.mark.promise("unique-window")
def test_of_a_window_one_job_is_stored(told, django_capture_on_commit_callbacks):
    # When the same is enqueued twice, and something else
    with django_capture_on_commit_callbacks(execute=True):
        first = hourly.enqueue(job="a", note="first")
        second = hourly.enqueue(job="a", note="second")
        other = hourly.enqueue(job="b", note="other")
    # Then the first stands
    assert [first.is_new, second.is_new, other.is_new] == [True, False, True]
    assert (second.answer, second.job_id, second.existing_state) == (
        "duplicate",
        first.job_id,
        "queued",
    )
    assert notes() == ["first", "other"]
    assert len(told) == 2


def test_a_job_that_has_run_stands_for_its_window():
    # Given
    first = hourly.enqueue(job="a")
    drain()
    # When
    second = hourly.enqueue(job="a")
    # Then
    assert (second.answer, second.job_id) == ("completed", first.job_id)
    assert list(Entry.objects.values_list("job", flat=True)) == ["a"]


def test_the_next_window_has_a_job_of_its_own():
    """So the result and the history of the first stay."""
    # Given one job that has run, and one that waits
    first = hourly.enqueue(job="a", note="first")
    drain()
    hourly.enqueue(job="b", note="waits")
    begin_earlier(HOUR)
    # When
    answers = [hourly.enqueue(job="a", note="second"), hourly.enqueue(job="b", note="third")]
    # Then
    assert [answer.is_new for answer in answers] == [True, True]
    assert notes() == ["first", "waits", "second", "third"]
    assert Job.objects.get(pk=first.job_id).state == "completed"
    assert not hourly.enqueue(job="a").is_new


def test_a_cancelled_job_stands_for_nothing():
    first = hourly.enqueue(job="a")
    cancel_one(first.job_id)
    assert hourly.enqueue(job="a").is_new
    assert not hourly.enqueue(job="a").is_new


def test_without_names_all_arguments_are_compared():
    every = write.using(unique_for=HOUR)
    assert every.enqueue(job="a", note="x").is_new
    assert every.enqueue(job="a", note="y").is_new
    assert not every.enqueue(note="x", job="a").is_new
    # An argument that is left out is its default.
    assert every.enqueue(job="a").is_new
    assert not every.enqueue(job="a", note="").is_new


def test_with_no_names_the_handler_alone_is_compared():
    alone = write.using(unique_for=HOUR, unique_by=())
    assert alone.enqueue(job="a").is_new
    assert not alone.enqueue(job="b").is_new
    assert write_keyed.using(unique_for=HOUR, unique_by=()).enqueue(job="a", key="").is_new


def test_values_are_compared_as_they_are_sent():
    give = job(name="tests.give_value", queue="ledger", unique_for=HOUR)(lambda value: None)
    try:
        stored = [give.enqueue(value=value).is_new for value in (1, True, 1.0, "1", None, [1])]
        assert stored == [True] * 6
        assert give.enqueue(value={"a": {"b": 1, "c": 2}}).is_new
        assert not give.enqueue(value={"a": {"c": 2, "b": 1}}).is_new
    finally:
        registry.unregister("tests.give_value")


def test_a_window_belongs_to_its_queue():
    assert hourly.enqueue(job="a").is_new
    assert hourly.using(queue="other").enqueue(job="a").is_new


# --- What to do about the job that is there -------------------------------------------------------


def test_a_job_that_has_not_begun_is_replaced():
    # Given
    first = hourly.using(on_conflict="replace", max_attempts=2).enqueue(job="a", note="first")
    # When
    second = hourly.using(on_conflict="replace", max_attempts=7).enqueue(job="a", note="second")
    # Then it is the same job, in another generation, with the new payload and options
    assert (second.answer, second.job_id, second.is_new) == ("replaced", first.job_id, False)
    stored = Job.objects.get()
    assert (stored.generation, stored.max_attempts) == (2, 7)
    assert notes() == ["second"]
    drain()
    assert list(Entry.objects.values_list("note", flat=True)) == ["second"]


def test_a_replaced_payload_goes_to_the_transport(transport):
    for note in ("first", "second"):
        hourly.using(on_conflict="replace").enqueue(job="a", note=note)
    generations = [names.from_json(each.headers)[names.GENERATION] for each in messages()]
    assert generations == ([b"1", b"2"] if transport == "database" else [])
    assert Job.objects.get().state == ("queued" if transport == "database" else "pending")


def test_a_job_that_has_run_is_not_replaced():
    replacing = hourly.using(on_conflict="replace")
    replacing.enqueue(job="a", note="first")
    drain()
    assert replacing.enqueue(job="a", note="second").answer == "completed"
    assert notes() == ["first"]


def test_a_job_between_two_attempts_is_replaced_and_has_all_its_attempts_again():
    # Given a job that has failed once
    replacing = hourly.using(on_conflict="replace")
    first = replacing.enqueue(job="a", note="first")
    Job.objects.update(state="failing", attempts=1, error="not yet")
    # When
    assert replacing.enqueue(job="a", note="second").answer == "replaced"
    # Then
    stored = Job.objects.get(pk=first.job_id)
    assert (stored.attempts, stored.error, stored.generation) == (0, "", 2)


def test_a_job_that_runs_outside_a_transaction_is_not_replaced():
    """Its lease is in its row."""
    replacing = hourly.using(on_conflict="replace")
    first = replacing.enqueue(job="a", note="first")
    Job.objects.update(lease_token="w", lease_expires_at=timezone.now() + MINUTE)
    answer = replacing.enqueue(job="a", note="second")
    assert (answer.answer, answer.existing_state, answer.job_id) == (
        "duplicate",
        "processing",
        first.job_id,
    )


def test_an_error_names_the_job_that_is_there():
    # Given
    raising = hourly.using(on_conflict="raise")
    first = raising.enqueue(job="a")
    # When
    with pytest.raises(JobExistsError, match=f"{first.job_id} is there already, queued") as error:
        raising.enqueue(job="a")
    # Then
    assert (error.value.job_id, error.value.existing_state) == (str(first.job_id), "queued")
    assert error.value.to_dict()["code"] == "JOB_EXISTS"


def test_the_callers_transaction_survives_the_error():
    raising = hourly.using(on_conflict="raise")
    raising.enqueue(job="a", note="first")
    with transaction.atomic():
        with pytest.raises(JobExistsError):
            raising.enqueue_many([{"job": "b", "note": "undone"}, {"job": "a"}])
        write.enqueue(job="c", note="goes on")
    assert notes() == ["first", "goes on"]


@pytest.mark.parametrize("on_conflict", ["replace", "raise"])
def test_an_id_of_the_callers_may_replace_or_raise(on_conflict):
    # Given
    named = write.using(id="u", on_conflict=on_conflict)
    first = named.enqueue(job="a", note="first")
    # When
    if on_conflict == "raise":
        with pytest.raises(JobExistsError):
            named.enqueue(job="a", note="second")
    else:
        assert named.enqueue(job="a", note="second").answer == "replaced"
    # Then
    assert notes() == ["first" if on_conflict == "raise" else "second"]
    assert Job.objects.get().pk == first.job_id
    # And of many
    answers = write.using(on_conflict="replace").enqueue_many(
        [{"job": "a", "note": "third"}, {"job": "b"}], ids=["u", "v"]
    )
    assert [answer.answer for answer in answers] == ["replaced", "queued"]


def test_an_id_of_the_callers_decides_alone():
    declared = job(name="tests.declared", queue="ledger", unique_for=HOUR)(lambda: None)
    try:
        assert declared.enqueue().is_new
        assert not declared.enqueue().is_new
        assert declared.using(id="u").enqueue().is_new
        assert [each.is_new for each in declared.enqueue_many([{}, {}], ids=["v", "w"])] == [
            True
        ] * 2
    finally:
        registry.unregister("tests.declared")


# --- Debounce -------------------------------------------------------------------------------------


def test_the_last_payload_runs_once_it_has_been_quiet():
    # When three come
    first = latest.enqueue(job="a", note="first")
    answers = [latest.enqueue(job="a", note=note) for note in ("second", "last")]
    # Then there is one job, due a minute after the last
    assert [answer.answer for answer in (first, *answers)] == ["queued", "replaced", "replaced"]
    stored = Job.objects.get()
    assert notes() == ["last"]
    assert timedelta(seconds=50) < stored.available_at - timezone.now() <= MINUTE
    assert drain().runs == []
    # And it runs, once
    begin_earlier(MINUTE)
    drain()
    assert list(Entry.objects.values_list("note", flat=True)) == ["last"]


def test_each_call_puts_the_job_off():
    # Given
    latest.enqueue(job="a", note="first")
    begin_earlier(timedelta(seconds=40))
    # When
    latest.enqueue(job="a", note="second")
    # Then
    left = Job.objects.get().available_at - timezone.now()
    assert timedelta(seconds=50) < left <= MINUTE


def test_a_longest_wait_counts_from_the_first_call():
    # Given
    bounded = latest.using(debounce_max=timedelta(seconds=90))
    bounded.enqueue(job="a", note="first")
    begin_earlier(MINUTE)
    # When
    bounded.enqueue(job="a", note="second")
    # Then
    left = Job.objects.get().available_at - timezone.now()
    assert timedelta(seconds=20) < left <= timedelta(seconds=30)
    assert notes() == ["second"]


def test_after_a_run_the_next_call_begins_anew():
    latest.enqueue(job="a", note="first")
    begin_earlier(MINUTE)
    drain()
    assert latest.enqueue(job="a", note="second").is_new
    assert latest.enqueue(job="a", note="third").answer == "replaced"
    assert notes() == ["first", "third"]


def test_a_call_while_the_job_runs_stores_another_behind_it():
    # Given a job that runs outside a transaction
    running = latest.enqueue(job="a", note="running")
    Job.objects.update(lease_token="w", lease_expires_at=timezone.now() + MINUTE)
    # When
    after = latest.enqueue(job="a", note="second")
    # Then
    assert after.is_new
    assert after.job_id != running.job_id
    assert latest.enqueue(job="a", note="third").job_id == after.job_id
    assert notes() == ["running", "third"]
    # And they have one key, so that they run one after the other
    keys = set(Job.objects.values_list("key", flat=True))
    assert len(keys) == 1
    assert keys != {""}


def test_a_handler_may_call_its_own_job_again():
    """The call is for a job after this one: the running job's row is locked by its transaction."""

    @job(name="tests.again", queue="ledger", debounce=MINUTE, unique_by=())
    def again(number: int) -> None:
        Entry.objects.create(job=str(number))
        if number < 3:
            again.enqueue(number=number + 1)

    try:
        again.enqueue(number=1)
        drain(with_delayed=True)
        assert list(Entry.objects.values_list("job", flat=True)) == ["1", "2", "3"]
        assert Job.objects.filter(state="completed", generation=1).count() == 3
    finally:
        registry.unregister("tests.again")


def test_a_key_of_the_jobs_own_stays():
    write_keyed.using(debounce=MINUTE, unique_by="job").enqueue(job="a", key="k")
    assert Job.objects.get().key == "k"


def test_a_requeued_job_is_replaced_as_any_that_waits():
    first = latest.enqueue(job="a", note="first")
    begin_earlier(MINUTE)
    drain()
    requeue([first.job_id])
    assert latest.enqueue(job="a", note="second").answer == "replaced"
    assert Job.objects.get().generation == 3


# --- Many, coroutines, saves, roll-backs ----------------------------------------------------------


def test_many_are_stored_as_one_by_one(transport):
    payloads = [{"job": name, "note": note} for name, note in ("b1", "a1", "b2", "c1", "a2")]
    # When
    kept = hourly.enqueue_many(payloads)
    replaced = latest.using(queue="other").enqueue_many(payloads)
    # Then the answers stand in the order of the payloads
    assert [answer.is_new for answer in kept] == [True, True, False, True, False]
    assert kept[2].job_id == kept[0].job_id
    assert [answer.answer for answer in replaced] == [
        *("queued", "queued", "replaced", "queued", "replaced")
    ]
    notes_by_queue = {
        queue: {stored.arguments["note"] for stored in Job.objects.filter(queue=queue)}
        for queue in ("ledger", "other")
    }
    assert notes_by_queue == {"ledger": {"1"}, "other": {"1", "2"}}


def test_a_coroutine_enqueues_in_windows_too():
    assert async_to_sync(hourly.aenqueue)(job="a").is_new
    assert not async_to_sync(hourly.aenqueue)(job="a").is_new


def test_a_save_enqueues_in_windows_too(monkeypatch):
    monkeypatch.setattr(post_save, "receivers", list(post_save.receivers))
    monkeypatch.setattr(Group, "save_base", Group.save_base)
    post_save.sender_receivers_cache.clear()
    enqueue_on_save(Group, latest, payload=lambda group: {"job": "a", "note": group.name})
    for name in ("first", "last"):
        Group(name=name).save()
    assert notes() == ["last"]
    with pytest.raises(ValueError, match="Give id, or unique_for or debounce"):
        enqueue_on_save(Group, latest, payload=lambda group: {}, id=lambda group: "u")


@pytest.mark.parametrize("definition", [latest, hourly.using(on_conflict="replace")])
def test_a_rollback_leaves_what_was_before(definition, told, transport):
    # Given
    definition.enqueue(job="a", note="first")
    before = Job.objects.values().get(), len(messages()), len(told)
    # When
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="undone"), transaction.atomic():
            definition.enqueue(job=name, note="second")
            raise ValueError("undone")
    # Then
    assert (Job.objects.values().get(), len(messages()), len(told)) == before


def test_a_window_costs_one_query_more_and_others_pay_nothing(transport):
    if connections["default"].vendor == "mysql":
        pytest.skip("its INSERT does not tell which rows it has made: one more query")

    def queries(definition: Any) -> list[str]:
        with CaptureQueriesContext(connections["default"]) as found:
            definition.enqueue(job="a")
        sent = [query["sql"] for query in found]
        return [sql for sql in sent if "SAVEPOINT" not in sql and not sql.endswith('"id" IS NULL')]

    write.enqueue(job="the groups of the topic are known")
    alone = len(queries(write))
    assert alone == (2 if transport == "database" else 1)
    lock = connections["default"].vendor == "sqlite"  # taken before it reads
    assert len(queries(hourly)) == alone + 1 + lock


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"unique_for": "60"},
            "unique_for must be a positive timedelta or number of seconds, of at most 3650 days, "
            "not '60'",
        ),
        ({"unique_for": timedelta(0)}, "unique_for must be a positive timedelta"),
        ({"debounce": -MINUTE}, "debounce must be a positive timedelta"),
        ({"debounce": timedelta(days=4000)}, "debounce must be a positive timedelta or"),
        ({"debounce": MINUTE, "unique_for": MINUTE}, "Give unique_for or debounce, not both"),
        ({"debounce": MINUTE, "on_conflict": "keep"}, "debounce replaces the job that waits"),
        ({"debounce": MINUTE, "delay": MINUTE}, "leave delay and run_at out"),
        ({"debounce": MINUTE, "run_at": MOMENT}, "leave delay and run_at out"),
        ({"debounce_max": MINUTE}, "debounce_max needs debounce"),
        ({"debounce": HOUR, "debounce_max": MINUTE}, "must not be shorter than debounce"),
        ({"debounce": MINUTE, "id": "a"}, "Give id, or unique_for or debounce"),
        ({"unique_for": MINUTE, "id": "a"}, "Give id, or unique_for or debounce"),
        ({"id": "kjo-unique:a"}, "id must not begin with 'kjo-unique:'"),
        ({"on_conflict": "ignore"}, "on_conflict must be one of 'keep', 'replace', 'raise', not "),
        ({"unique_by": ("job",)}, "ledger.write: unique_by needs unique_for or debounce"),
        ({"unique_for": MINUTE, "unique_by": 5}, "unique_by must be a list of names of arguments"),
        (
            {"unique_for": MINUTE, "unique_by": ("note", "jbo")},
            "unique_by='jbo' is not an argument of the function. Did you mean 'job'? "
            "It takes: job, note.",
        ),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, says):
    with writing_nothing(), pytest.raises(ValueError, match=re.escape(says)):
        write.using(**options)


def test_the_decorator_refuses_the_same():
    def refund(order, country=""): ...

    for options, says in (
        ({"debounce": 0}, "job(debounce=0): debounce must be a positive timedelta"),
        ({"on_conflict": "x"}, "job(on_conflict='x'): on_conflict must be one of"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            job(**options)
    with pytest.raises(ValueError, match="Give unique_for or debounce"):
        job(name="refund", debounce=MINUTE, unique_for=MINUTE)(refund)
    with pytest.raises(ValueError, match="unique_by needs unique_for or debounce"):
        job(name="refund", unique_by="order")(refund)
    with pytest.raises(ValueError, match="on_conflict needs unique_for"):
        job(name="refund", on_conflict="raise")(refund)
    says = r"The job refund: unique_by='land' is not an argument.*It takes: country, order\."
    with pytest.raises(ImproperlyConfigured, match=says):
        job(name="refund", debounce=MINUTE, unique_by=("order", "land"))(refund)
    assert registry.find("refund") is None
    # And a debounced job says itself when it is due
    refund_job: Any = job(name="refund", debounce=MINUTE, unique_by="order")(refund)
    try:
        with pytest.raises(ValueError, match="is debounced, which says when it is due"):
            refund_job.using(delay=MINUTE)
    finally:
        registry.unregister("refund")


# --- Who holds a row ------------------------------------------------------------------------------


@pytest.mark.usefixtures("postgres")
class TestOnPostgres:
    """A running handler's row is locked; so is one that another request has just changed."""

    @pytest.mark.parametrize("definition", [latest, hourly.using(on_conflict="replace")])
    def test_a_request_waits_for_another_that_has_changed_the_job(self, definition):
        definition.enqueue(job="a", note="first")
        with ThreadPoolExecutor(1) as pool:
            with transaction.atomic():
                definition.enqueue(job="a", note="second")
                other = pool.submit(elsewhere, definition, "third")
                assert not other.done()
            assert other.result(PATIENCE).answer == "replaced"
        assert notes() == ["third"]

    def test_a_request_does_not_wait_for_a_handler(self, monkeypatch):
        # Given a handler in the midst of its transaction, under its worker's lease
        from kjo_django.enqueue import unique

        latest.enqueue(job="a", note="running")
        held, done = threading.Event(), threading.Event()

        def run() -> None:
            try:
                with transaction.atomic():
                    Job.objects.select_for_update(no_key=True).get()
                    held.set()
                    done.wait(PATIENCE)
            finally:
                connections.close_all()

        monkeypatch.setattr(unique, "_is_leased", lambda job: True)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run)
            held.wait(PATIENCE)
            # When
            answers = [latest.enqueue(job="a", note=note) for note in ("second",)]
            done.set()
            running.result(PATIENCE)
        # Then
        assert [answer.is_new for answer in answers] == [True]
        assert notes() == ["running", "second"]

    @pytest.mark.promise("unique-without-coordination")
    def test_while_coordination_is_away_nobody_waits_for_a_locked_row(self, coordination_away):
        latest.enqueue(job="a", note="first")
        let_run(Job.objects.get())
        coordination_away("holders")
        with ThreadPoolExecutor(1) as pool, transaction.atomic():
            Job.objects.select_for_update(no_key=True).get()
            assert pool.submit(elsewhere, latest, "second").result(PATIENCE).is_new


def elsewhere(definition: Any, note: str) -> Any:
    """Enqueue on a connection of this thread's own."""
    try:
        return definition.enqueue(job="a", note=note)
    finally:
        connections.close_all()
