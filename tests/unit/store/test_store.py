"""Each store answers as the reference does, which is written with the ORM."""

from __future__ import annotations

from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from kjo_django.models import DeadLetter, EventKey, Job, Lease, ProcessedEvent
from kjo_django.store import store_for
from kjo_django.store.base import Store
from kjo_django.store.rows import Completion, Place, Publication, row_of
from tests.databases import led_to
from tests.factories import DeadLetterFactory, JobFactory
from tests.services.fixtures import require
from tests.services.mariadb import MariaDbServer
from tests.services.mysql import MySqlServer
from tests.settings import database

MINUTE = timedelta(minutes=1)


@pytest.fixture(params=["reference", "own"])
def store(request: pytest.FixtureRequest, any_database: str) -> Store:
    return Store("default") if request.param == "reference" else store_for("default")


def ids(*jobs: Job) -> list[str]:
    return [str(job.pk) for job in jobs]


def test_a_marker_is_new_once_and_can_be_taken_back(store):
    one, two = EventKey("1", "shop", "paid"), EventKey("2", "shop", "paid")
    with transaction.atomic():
        assert store.insert_markers([one]) == {one}
        assert store.insert_markers([two, one]) == {two}
        assert store.known_markers([one, two]) == {one, two}
        store.delete_markers([one])
    assert store.known_markers([one, two]) == {two}


def test_rows_are_read_as_they_are_and_only_those_asked_for(store):
    job, _ = JobFactory(queued=True, unique_id="a", expires_at=timezone.now()), JobFactory()
    with transaction.atomic():
        store.take_write_lock()
        (row,) = store.job_rows(ids(job), lock=True).values()
    assert (row.columns(), row.id_text) == (row_of(job).columns(), str(job.pk))


def test_markers_and_rows_come_together(store):
    job, key = JobFactory(queued=True), EventKey("1", "shop", "paid")
    with transaction.atomic():
        fresh, rows = store.insert_markers_and_lock([key], ids(job))
    assert (fresh, list(rows)) == ({key}, ids(job))


def test_a_row_s_lease_is_taken_renewed_and_released_by_its_holder(store):
    job = JobFactory(queued=True)
    row, now = row_of(job), timezone.now()
    assert store.take_row_leases([row], "me", now, now + MINUTE) == {job.pk}
    assert store.take_row_leases([row], "you", now, now + MINUTE) == set()
    for token, until in (("you", now), ("me", now + 2 * MINUTE)):
        store.renew_row_leases([job.pk], token, until)
        store.release_row_leases([job.pk], "you")
    job.refresh_from_db()
    assert (job.lease_token, job.lease_expires_at) == ("me", now + 2 * MINUTE)
    store.release_row_leases([job.pk], "me")
    job.refresh_from_db()
    assert (job.lease_token, job.lease_expires_at, job.started_at) == ("", None, None)


def test_completions_are_written_under_the_lease_they_need(store):
    mine, theirs = (JobFactory(queued=True, lease_token=token) for token in ("me", "you"))
    now = timezone.now()
    place = Place("topic", 1, 2, now)
    done = [Completion(row_of(job), 1, now, b"{}", place, 5000) for job in (mine, theirs)]
    with transaction.atomic():
        assert store.complete(done, now, token="me") == {mine.pk}
    mine.refresh_from_db()
    theirs.refresh_from_db()
    assert (mine.state, bytes(mine.result), mine.attempts) == ("completed", b"{}", 1)
    assert (mine.topic, mine.partition, mine.offset, mine.queued_at) == place
    assert (mine.result_ttl, mine.result_expires_at) == (5000, now + timedelta(seconds=5))
    assert (theirs.state, theirs.topic) == ("queued", "")


def test_what_another_worker_completed_at_the_same_moment_is_not_this_one_s(store):
    """Clocks of two workers may show the same microsecond."""
    mine, theirs, alone = (JobFactory(queued=True, lease_token=name) for name in ("me", *"ab"))
    now = timezone.now()
    # Given two jobs that other workers took over and completed
    with transaction.atomic():
        for job, token in ((theirs, "a"), (alone, "b")):
            assert store.complete([Completion(row_of(job), 1, now, None)], now, token=token)
    # When their first worker completes them at the same moment
    with transaction.atomic():
        done = [Completion(row_of(job), 1, now, None) for job in (mine, theirs)]
        written = store.complete(done, now, token="me")
        written_alone = store.complete([Completion(row_of(alone), 1, now, None)], now, token="me")
    # Then it has completed its own only
    assert (written, written_alone) == ({mine.pk}, set())


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_job_that_ended_at_the_same_moment_is_not_completed_again(store, is_alone):
    open_one, ended = JobFactory(queued=True), JobFactory(state="completed")
    now = timezone.now()
    Job.objects.filter(pk=ended.pk).update(finished_at=now)
    jobs = [ended] if is_alone else [open_one, ended]
    done = [Completion(row_of(job), 1, now, None) for job in jobs]
    with transaction.atomic():
        assert store.complete(done, now) == (set() if is_alone else {open_one.pk})


def test_completions_keep_the_workers_they_name(store):
    jobs = [JobFactory(queued=True, lease_token="me", worker="of a run before") for _ in range(2)]
    now, name = timezone.now(), 'rack "7", \\2'
    done = [
        Completion(row_of(job), 1, now, None, worker=worker)
        for job, worker in zip(jobs, [name, ""], strict=True)
    ]
    with transaction.atomic():
        assert len(store.complete(done, now, token="me")) == 2
    rows = Job.objects.order_by("pk").values_list("state", "lease_token", "worker")
    assert list(rows) == [("completed", "", name), ("completed", "", "")]
    # And where none of all names one
    Job.objects.update(state="queued", worker="of a run before")
    with transaction.atomic():
        store.complete([Completion(row_of(job), 1, now, None) for job in jobs], now)
    assert set(Job.objects.values_list("worker", flat=True)) == {""}


@pytest.mark.parametrize("token", [None, "me", "you"])
@pytest.mark.parametrize("is_full", [True, False])
def test_one_completion_writes_what_it_would_among_others(store, is_full, token):
    """PostgreSQL has a statement for one, and another one for several."""
    now = timezone.now()
    jobs = [
        JobFactory(queued=True, queued_at=now, lease_token="me", error="before", worker="before")
        for _ in range(3)
    ]
    given = (b"\x00\xff%s", Place("topic", 1, 2, now - MINUTE), 5000, "rack %s") if is_full else ()
    begun = now - MINUTE if is_full else None
    alone, *together = [Completion(row_of(job), 2, begun, *(given or (None,))) for job in jobs]
    # When
    with transaction.atomic():
        written = store.complete([alone], now, token=token)
        written |= store.complete(together, now, token=token)
    # Then
    assert written == (set() if token == "you" else {job.pk for job in jobs})
    names = {"id", "created_at", "available_at", "updated_at"}
    columns = [field.attname for field in Job._meta.concrete_fields if field.name not in names]
    rows = Job.objects.order_by("pk").values_list(*columns)
    first, *others = [tuple(bytes(v) if isinstance(v, memoryview) else v for v in r) for r in rows]
    assert others == [first, first]


@pytest.mark.parametrize("count", [1, 50])
def test_new_jobs_are_stored_unless_their_unique_id_is_taken(store, count):
    jobs = [JobFactory.build(unique_id=f"{n}", headers={"a": "b"}) for n in range(count)]
    assert store.insert_jobs(jobs) == count
    again = [JobFactory.build(unique_id=f"{n}") for n in range(count + 1)]
    assert store.insert_jobs(again, ignore_conflicts=True) == 1
    stored = Job.objects.get(unique_id="0")
    assert (stored.pk, stored.headers, bytes(stored.payload)) == (
        jobs[0].pk,
        {"a": "b"},
        jobs[0].payload,
    )


def test_text_is_the_same_only_where_each_character_is(store):
    alike = ["a", "A", "a ", "\u00e4", "a\u0308"]
    assert store.insert_jobs([JobFactory.build(unique_id=text) for text in alike]) == 5
    assert set(store.claim_leases(sorted(alike), "me", MINUTE).values()) == {(True, 1)}
    assert Job.objects.get(unique_id="A").unique_id == "A"


def test_no_column_of_a_table_compares_text_otherwise(innodb):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name, collation_name FROM information_schema.columns"
            " WHERE table_schema = DATABASE() AND table_name LIKE 'kjo%'"
            " AND collation_name NOT IN ('utf8mb4_nopad_bin', 'utf8mb4_0900_bin', 'utf8mb4_bin')"
        )
        assert cursor.fetchall() == ()


def test_people_find_text_in_any_case(innodb):
    store_for("default")
    letter, _ = DeadLetterFactory(error="Connection refused"), DeadLetterFactory()
    assert list(DeadLetter.objects.filter(error__icontains="REFUSED")) == [letter]
    assert list(DeadLetter.objects.filter(error="connection refused")) == []


@pytest.mark.parametrize(
    "server_class",
    [
        pytest.param(MariaDbServer, marks=pytest.mark.mariadb, id="mariadb"),
        pytest.param(MySqlServer, marks=pytest.mark.mysql, id="mysql"),
    ],
)
@pytest.mark.parametrize("undoes_all", [False, True])
def test_what_follows_a_lock_that_was_not_granted_is_not_committed_without_what_came_before(
    django_db_setup, django_db_blocker, server_class, undoes_all
):
    """An option of the server says whether it undoes the transaction, or the statement."""
    require(**{server_class.name: True})
    # Given
    options = ["--innodb-rollback-on-timeout"] if undoes_all else []
    with (
        django_db_blocker.unblock(),
        server_class(options) as server,
        led_to(database(server.createdb("locks"))),
        closing(connection.copy()) as other,
        connection.cursor() as cursor,
    ):
        store_for("default")
        cursor.execute("CREATE TABLE pot (id int PRIMARY KEY, coins int)")
        cursor.execute("INSERT INTO pot VALUES (1, 0), (2, 0), (3, 0)")
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        other.set_autocommit(False)
        other.cursor().execute("UPDATE pot SET coins = 9 WHERE id = 2")
        # When somebody catches the error, and goes on
        going_on = pytest.raises(TransactionManagementError) if undoes_all else nullcontext()
        with going_on, transaction.atomic():
            cursor.execute("UPDATE pot SET coins = 1 WHERE id = 1")
            with pytest.raises(OperationalError, match="1205"):
                cursor.execute("UPDATE pot SET coins = 1 WHERE id = 2")
            cursor.execute("UPDATE pot SET coins = 1 WHERE id = 3")
        # Then
        cursor.execute("SELECT id, coins FROM pot WHERE id <> 2")
        assert dict(cursor.fetchall()) == ({1: 0, 3: 0} if undoes_all else {1: 1, 3: 1})


def test_what_is_due_comes_in_order_without_what_is_left_out(store):
    now = timezone.now()
    late, early, left_out, elsewhere, _ = (
        JobFactory(queue=queue, available_at=now - MINUTE * minutes, destination=topic)
        for queue, minutes, topic in (
            ("a", 1, ""),
            ("a", 4, ""),
            ("a", 2, ""),
            ("a", 3, "topic"),
            ("b", 5, ""),
        )
    )
    without = [left_out.pk], ["topic"]
    assert [job.id for job in store.due_jobs(["a"], 9, *without)] == [early.pk, late.pk]
    assert [job.id for job in store.due_jobs_of("a", 2)] == [early.pk, elsewhere.pk]
    assert store.next_due(["a"], [early.pk], ["topic"]) == left_out.available_at
    assert store.next_due(["c"]) is None


def test_payloads_are_loaded_as_far_as_a_limit_of_bytes_allows(store):
    now = timezone.now()
    payloads = [b"a" * 10, b"b" * 400, b"", b"c" * 700, b"d" * 300, b"e"]
    for number, payload in enumerate(payloads):
        due = now - MINUTE * (len(payloads) - number)
        JobFactory(queue="a", payload=payload, available_at=due, headers={"n": "1"})

    def found(max_bytes: int) -> list[bytes]:
        due = store.due_jobs(["a"], 10, max_bytes=max_bytes)
        of_queue = store.due_jobs_of("a", 10, max_bytes=max_bytes)
        assert due == of_queue
        assert all(job.headers == {"n": "1"} for job in due)
        return [bytes(job.payload) for job in due]

    # No row follows the one with which they reach it, so there is always one
    assert found(1000) == payloads[:4]
    assert found(1110) == payloads[:4]
    assert found(1111) == payloads[:5]
    assert found(1) == payloads[:1]
    assert found(10**6) == payloads


def test_a_job_that_changes_while_its_payload_is_loaded_is_left_out(store):
    kept, changed = (JobFactory(queue="a", payload=b"x" * 900) for _ in range(2))
    statements = []

    def change(execute, sql, params, many, context):
        statements.append(sql)
        if len(statements) == 2:
            Job.objects.filter(pk=changed.pk).update(generation=2, payload=b"y" * 900)
        return execute(sql, params, many, context)

    # When it is enqueued again between the two looks
    with connection.execute_wrapper(change):
        due = store.due_jobs(["a"], 10, max_bytes=5000)
    # Then it is not sent as what it was, with what it is now
    assert [(job.id, bytes(job.payload)) for job in due] == [(kept.pk, b"x" * 900)]
    assert len(store.due_jobs(["a"], 10, max_bytes=5000)) == 2


def test_where_messages_went_is_recorded_unless_the_job_has_moved_on(store):
    sent, moved_on, forwarded = JobFactory(), JobFactory(), JobFactory(destination="topic")
    due = {job.id: job for job in store.due_jobs([sent.queue], 9)}
    Job.objects.filter(pk=moved_on.pk).update(attempts=1)
    now = timezone.now()
    published = [Publication(due[job.pk], "sent", 1, 2) for job in (sent, moved_on)]
    assert store.record_published(published, now) == set()
    store.complete_forwarded([Publication(due[forwarded.pk], "", 1, 2)], now)
    found = {job.pk: (job.state, job.topic, job.offset) for job in Job.objects.all()}
    assert found == {
        sent.pk: ("queued", "sent", 2),
        moved_on.pk: ("pending", "", None),
        forwarded.pk: ("completed", "topic", 2),
    }


def test_leases_are_claimed_once_and_deleted_by_their_holder(store):
    def claim(token: str) -> dict[str, tuple[bool, int]]:
        return store.claim_leases(["a", "b"], token, MINUTE)

    assert claim("me") == claim("me") == {"a": (True, 1), "b": (True, 1)}
    assert claim("you") == {"a": (False, 1), "b": (False, 1)}
    Lease.objects.filter(name="a").update(expires_at=timezone.now())
    assert claim("you") == {"a": (True, 2), "b": (False, 1)}
    store.delete_leases(["a", "b"], "me")
    assert list(Lease.objects.values_list("name", "token")) == [("a", "you")]


# --- Markers of effects ---------------------------------------------------------------------------


def keys(*numbers: int) -> list[EventKey]:
    return [EventKey(f"event-{number}", "shop", "paid") for number in numbers]


def mark(marked: list[EventKey], **options) -> set[EventKey]:
    with transaction.atomic():
        return store_for("default").insert_markers(marked, **options)


@pytest.mark.parametrize("count", [1, 950], ids=["one", "more than a statement asks for"])
def test_of_those_known_already_none_is_new_and_the_others_are(real_database, count):
    # Given
    assert mark(keys(*range(count))) == set(keys(*range(count)))
    # When
    fresh = mark(keys(*range(2 * count)))
    # Then
    assert fresh == set(keys(*range(count, 2 * count)))
    assert mark(keys(*range(2 * count))) == set()
    assert ProcessedEvent.objects.count() == 2 * count


def test_one_key_twice_is_one_marker(real_database):
    assert mark(keys(1, 1)) == set(keys(1))
    assert ProcessedEvent.objects.count() == 1


def test_a_marker_can_be_read_as_django_would_have_written_it(real_database):
    # Given
    moment = datetime(2024, 2, 29, 12, 0, 0, 123456, UTC)
    # When
    mark(keys(1), now=moment)
    # Then
    marker = ProcessedEvent.objects.get()
    assert (marker.event_key, marker.processed_at) == (keys(1)[0], moment)
    assert (marker.created_at, marker.updated_at) == (moment, moment)
    assert ProcessedEvent.objects.get(pk=marker.pk) == marker
    assert marker.pk.version == 7


def isolation() -> str:
    with connection.cursor() as cursor:
        name = "tx" if connection.mysql_is_mariadb else "transaction"
        cursor.execute(f"SELECT @@{name}_isolation")
        return cursor.fetchone()[0]


def test_after_its_session_was_ended_a_connection_reads_what_is_committed(innodb):
    """PyMySQL before 1.2 connects by itself when Django asks whether a connection works, and of the
    new session the isolation level is the server's: claims of a topic do not see one another."""
    # Given a connection that is kept, and whose session the server has ended
    assert isolation() == "READ-COMMITTED"
    connection.close_at = None  # as with CONN_MAX_AGE=None
    number, other = connection.connection.thread_id(), connections.create_connection("default")
    with other.cursor() as cursor:
        cursor.execute(f"KILL {number}")
    other.close()
    with pytest.raises(OperationalError):
        isolation()
    # When it is looked after, as it is after each outage
    connection.close_if_unusable_or_obsolete()
    # Then
    assert isolation() == "READ-COMMITTED"
