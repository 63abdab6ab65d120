"""Jobs over HTTP: what is told of them, waiting for them, and what is done to them."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, connections
from django.utils import timezone
from rest_framework.test import APIClient

from kjo_django.engine.handler.running import dump_progress
from kjo_django.enqueue.job_status import progress_name
from kjo_django.enqueue.waiting import Awaited, Waiter
from kjo_django.messages.serializers import dump_result
from kjo_django.models import Job
from kjo_django.operations import jobs as operations
from kjo_django.operations.bulk import start_bulk
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.internal import UserActor
from kjo_django.runtime import get_coordination
from kjo_django.testing import run_job
from tests.api.conftest import Login, errors_of, problem_of
from tests.factories import DeadLetterFactory, JobFactory, JobFailureFactory
from tests.running_jobs import let_run
from tests.waiting import PATIENCE, wait_until


def url(job: Any, action: str = "") -> str:
    return f"/kjo/jobs/{getattr(job, 'pk', job)}/{action and action + '/'}"


def hold(job: Job) -> None:
    """Let a living worker run the job."""
    let_run(job, worker="w-1")


# --- What is told ---------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_jobs_status_and_progress_are_shown_to_whoever_may_see_jobs(login: Login) -> None:
    # Given a job that says how far it is
    job = JobFactory(state="queued")
    marks = {progress_name(str(job.pk)): dump_progress(42, "resizing")}
    get_coordination().set_marks(marks, timedelta(minutes=1))
    hold(job)
    # When
    told = login("view_job").get(url(job)).json()
    # Then
    assert (told["state"], told["status"]) == ("queued", "processing")
    assert told["progress"] == {"percent": 42, "text": "resizing"}


@pytest.mark.django_db
def test_what_a_job_holds_needs_the_permission_for_payloads(login: Login) -> None:
    # Given
    secret = b'{"name": "Ada", "password": "hunter2", "card": {"token": "t-1"}}'
    job = JobFactory(
        completed=True, payload=secret, result=dump_result({"api_key": "k", "a": 1}), headers={}
    )
    JobFailureFactory(job=job, traceback="File x", log="INFO charging")
    # Then
    told = login("view_job").get(url(job)).json()
    assert not {"payload", "result", "headers", "dead_letters"} & told.keys()
    assert not {"traceback", "log"} & told["failures"][0].keys()
    # and with it, what is secret stays so
    told = login("view_job", "view_payload").get(url(job)).json()
    assert told["payload"]["name"] == "Ada"
    assert told["payload"]["password"] == told["payload"]["card"]["token"] == "[redacted]"
    assert told["result"] == {"api_key": "[redacted]", "a": 1}
    assert told["failures"][0]["traceback"] == "File x"
    assert told["failures"][0]["log"] == "INFO charging"


@pytest.mark.django_db
def test_a_jobs_history_is_told(login: Login) -> None:
    job = JobFactory(failed=True)
    for attempt in (1, 2):
        JobFailureFactory(job=job, attempt=attempt)
    letter = DeadLetterFactory(job=job)
    told = login("view_job", "view_deadletter").get(url(job)).json()
    assert [failure["attempt"] for failure in told["failures"]] == [1, 2]
    assert [each["id"] for each in told["dead_letters"]] == [str(letter.pk)]
    assert told["error"] == "ValueError"


@pytest.mark.django_db
@pytest.mark.parametrize("worker", ["", "berlin"])
def test_the_worker_that_completed_a_job_is_told_where_it_is_kept(
    login: Login, worker: str
) -> None:
    job = JobFactory(completed=True, worker=worker)
    assert login("view_job").get(url(job)).json()["worker"] == worker


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("payload", "content_type"),
    [
        (b"\xff\xfe", "application/json"),
        (b'"\\ud800"', "application/json"),
        (b"[" * 900, "application/json"),
        (b'{"a": ' * 300 + b"1" + b"}" * 300, "application/json"),
        (b"x", "application/x-unknown"),
        (b"\x81\xc4\x01a\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", "application/msgpack"),
    ],
)
def test_a_payload_nobody_can_read_is_no_error(
    login: Login, payload: bytes, content_type: str
) -> None:
    job = JobFactory(
        completed=True, payload=payload, content_type=content_type, result=payload, headers=None
    )
    assert login("view_job", "view_payload").get(url(job)).status_code == 200
    letter = DeadLetterFactory(
        value=payload, key=b"\xff\0", content_type=content_type, headers={"a": "/w=="}
    )
    told = login("view_deadletter", "view_payload").get(f"/kjo/dead-letters/{letter.pk}/").json()
    assert told["key"] == "0xff00"
    assert told["headers"] == {"a": "0xff"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    "id", ["00000000-0000-7000-8000-00000000000a", "7", "x" * 300, "%00", "🙂"]
)
@pytest.mark.parametrize("place", ["jobs", "dead-letters", "workers"])
def test_what_is_not_there_is_told_so(superuser: APIClient, place: str, id: Any) -> None:
    problem_of(superuser.get(f"/kjo/{place}/{id}/"), 404)


# --- Lists ----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_pages_hold_every_job_once_while_new_ones_come(login: Login) -> None:
    # Given
    client = login("view_job")
    wanted = [str(JobFactory().pk) for _ in range(7)][::-1]
    found: list[str] = []
    query = {"limit": 3}
    # When more are enqueued between the pages
    for _ in range(3):
        told = client.get("/kjo/jobs/", query).json()
        found += [job["id"] for job in told["results"]]
        JobFactory()
        query["cursor"] = told["next_cursor"]
    # Then
    assert told["next_cursor"] is None
    assert found == wanted


@pytest.mark.django_db
def test_a_list_is_restricted_by_each_parameter(login: Login) -> None:
    client = login("view_job", "view_payload")
    JobFactory(failed=True, queue="mails", handler="shop.send", key="k", unique_id="u")
    JobFactory()
    for name, value in {
        "state": "failed",
        "queue": "mails",
        "handler": "shop.send",
        "key": "k",
        "unique_id": "u",
    }.items():
        (job,) = client.get("/kjo/jobs/", {name: value}).json()["results"]
        assert job["queue"] == "mails"
    assert client.get("/kjo/jobs/", {"state": "failed", "queue": "default"}).json()["results"] == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=faild", "state"),
        ("state=", "state"),
        ("q=state:faild", "q"),
        ("q=args..a:1", "q"),
        ("q=%00", "q"),
        ("q=queue:a&queue=b", "queue"),
        ("q=" + "x" * 4001, "q"),
        ("stat=failed", "stat"),
        ("unique_id=", "unique_id"),
        ("limit=0", "limit"),
        ("limit=1000000", "limit"),
        ("limit=x", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=", "cursor"),
        ("queue=%00", "queue"),
        ("handler=a&handler=b", "handler"),
        ("key=" + "x" * 256, "key"),
    ],
)
def test_a_filter_with_a_slip_is_refused(login: Login, query: str, field: str) -> None:
    assert field in errors_of(login("view_job").get(f"/kjo/jobs/?{query}"))


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "make", "permission", "large"),
    [
        ("jobs", JobFactory, "view_job", ('"payload"', '"result"')),
        (
            "dead-letters",
            DeadLetterFactory,
            "view_deadletter",
            ("traceback", "value", "headers", '"key"'),
        ),
    ],
)
def test_a_list_costs_the_same_however_long_and_loads_nothing_large(
    login: Login,
    path: str,
    make: Any,
    permission: str,
    large: tuple[str, ...],
    django_assert_max_num_queries: Any,
) -> None:
    client = login(permission)
    numbers = set()
    for count in (1, 40):
        make.create_batch(count)
        with django_assert_max_num_queries(10) as asked:
            assert len(client.get(f"/kjo/{path}/").json()["results"]) >= count
        numbers.add(len(asked))
        table = next(q["sql"] for q in asked.captured_queries if "ORDER BY" in q["sql"])
        selected = table.partition(" FROM ")[0]
        assert not [column for column in large if column in selected]
    assert len(numbers) == 1
    # and what is counted is nothing
    assert not [q["sql"] for q in asked.captured_queries if "COUNT(" in q["sql"]]


@pytest.mark.django_db
def test_a_search_finds_what_its_words_say(login: Login) -> None:
    JobFactory(failed=True, queue="mails", error="rate limit", payload=b'{"order": {"id": 17}}')
    JobFactory(failed=True)
    client = login("view_job", "view_payload")
    for q in ('error:"rate limit"', "state:failed queue:mai*", "args.order.id:17"):
        (job,) = client.get("/kjo/jobs/", {"q": q}).json()["results"]
        assert job["error"] == "rate limit"
    told = client.get("/kjo/jobs/", {"q": "rate", "state": "failed"}).json()
    assert (len(told["results"]), told["is_windowed"]) == (1, False)


@pytest.mark.django_db
def test_payloads_are_searched_by_those_who_may_see_them(login: Login) -> None:
    problem_of(login("view_job").get("/kjo/jobs/", {"q": "args.order_id:17"}), 403)


# --- Waiting --------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(sqlite_file: Path) -> Any:
    """Do something in a thread of its own, on a database several threads can see."""
    threads: list[threading.Thread] = []

    def run(act: Any) -> None:
        def act_and_close() -> None:
            try:
                act()
            finally:
                connections.close_all()

        threads.append(threading.Thread(target=act_and_close))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join()


def test_a_wait_ends_when_the_job_does(
    elsewhere: Any, login: Login, greet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job, and a request that waits for it, for longer than this test may last
    client = login("view_job", "view_payload")
    job = greet.enqueue(name="Ada").job_id
    is_open = threading.Event()

    class Patient(Waiter):
        def __init__(self, timeout: float, **options: Any) -> None:
            super().__init__(3600, **options)

        def _remaining(self, awaited: Any) -> float:
            is_open.set()
            return super()._remaining(awaited)

    monkeypatch.setattr("kjo_django.api.jobs.Waiter", Patient)

    def work() -> None:
        is_open.wait()
        run_job(job)

    elsewhere(work)
    # When it runs
    answer = client.get(url(job, "wait"), {"timeout": 20})
    # Then
    assert answer.status_code == 200
    assert answer.json()["status"] == "completed"
    assert answer.json()["result"] == "Hello Ada"


def test_a_wait_for_a_job_that_is_cancelled_ends_too(elsewhere: Any, login: Login) -> None:
    client, job = login("view_job"), JobFactory()
    elsewhere(lambda: operations.cancel([job]))
    answer = client.get(url(job, "wait"), {"timeout": 20})
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


def test_a_wait_for_a_result_nobody_here_can_read_ends_too(elsewhere: Any, login: Login) -> None:
    """Its serializer is known to its workers alone."""
    client = login("view_job", "view_payload")
    job = JobFactory(content_type="application/x-theirs")
    ended = {"state": "completed", "result": b"...", "finished_at": timezone.now()}
    seen = threading.Event()

    def end() -> None:
        seen.wait(PATIENCE)
        Job.objects.filter(pk=job.pk).update(**ended)

    elsewhere(end)
    threading.Timer(0.3, seen.set).start()
    answer = client.get(url(job, "wait"), {"timeout": 20})
    assert (answer.status_code, answer.json()["status"]) == (200, "completed")
    assert "No serializer" in answer.json()["result"]


def test_a_wait_that_is_too_short_says_so(elsewhere: Any, login: Login) -> None:
    answer = login("view_job").get(url(JobFactory(), "wait"), {"timeout": 0.1})
    assert (answer.status_code, answer.json()["status"]) == (202, "pending")
    assert login("view_job").get(url(JobFactory(), "wait"), {"timeout": 0}).status_code == 202


def test_a_wait_holds_no_transaction(
    elsewhere: Any, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a project whose requests are transactions
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    looked: list[bool] = []
    usual = Awaited.look

    def look(awaited: Any) -> Any:
        looked.append(connections["default"].in_atomic_block)
        return usual(awaited)

    monkeypatch.setattr(Awaited, "look", look)
    # When
    login("view_job").get(url(JobFactory(), "wait"), {"timeout": 0.05})
    # Then
    assert looked
    assert not any(looked)


@pytest.mark.postgres
def test_those_who_wait_have_no_database_session(
    postgres: None, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each long poll held one: a few dozen took all that a server gives."""
    # Given
    looked: set[int] = set()
    usual = Awaited.look

    def look(awaited: Any) -> Any:
        looked.add(threading.get_ident())
        return usual(awaited)

    monkeypatch.setattr(Awaited, "look", look)
    job, count, before = JobFactory(), 6, sessions()
    clients = [login("view_job") for _ in range(count)]
    answers: list[int] = []

    def wait(client: APIClient) -> None:
        try:
            answers.append(client.get(url(job, "wait"), {"timeout": 30}).status_code)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=wait, args=[client]) for client in clients]
    # When
    for thread in threads:
        thread.start()
    # Then one session is left, which listens for all of them, and those that look just now
    try:
        wait_until(
            lambda: len(sessions() - before) <= 3 and len(looked) == count, "one session", sessions
        )
        assert not answers
    finally:
        operations.cancel([job])
        for thread in threads:
            thread.join()
    # And all of them learn of its end
    assert answers == [200] * count


def sessions() -> set[int]:
    """The process ids of the sessions of others that the test's database has."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return {int(pid) for (pid,) in cursor}


@pytest.mark.django_db
@pytest.mark.parametrize("timeout", ["31", "-1", "nan", "inf", "x", "", "1e400"])
def test_a_wait_has_a_limit(login: Login, timeout: str) -> None:
    answer = login("view_job").get(url(JobFactory(completed=True), "wait"), {"timeout": timeout})
    assert "timeout" in errors_of(answer)


@pytest.mark.django_db
def test_a_wait_for_a_job_that_is_not_there(login: Login) -> None:
    problem_of(login("view_job").get(url(uuid.uuid4(), "wait")), 404)


# --- What is done to them -------------------------------------------------------------------------


@pytest.fixture
def operator(login: Login, db: None) -> APIClient:
    return login("view_job", "cancel_job", "retry_job")


def test_a_job_is_cancelled_once_and_stays_so(operator: APIClient) -> None:
    job = JobFactory()
    for _ in range(2):
        answer = operator.post(url(job, "cancel"))
        assert answer.json()["outcome"] == "cancelled"
        assert answer.json()["job"]["status"] == "cancelled"
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_what_has_ended_is_not_cancelled(operator: APIClient, state: str) -> None:
    job = JobFactory(**{state: True})
    assert state in problem_of(operator.post(url(job, "cancel")), 409)["detail"]
    assert Job.objects.get().state == state


def test_a_running_job_is_asked_to_end_if_that_is_wanted(operator: APIClient) -> None:
    job = JobFactory(state="queued")
    hold(job)
    problem_of(operator.post(url(job, "cancel")), 409)
    assert not LogEntry.objects.exists()
    answer = operator.post(url(job, "cancel"), {"abort": True})
    assert (answer.status_code, answer.json()["outcome"]) == (202, "processing")
    assert LogEntry.objects.get().change_message == "Asked to end."


def test_while_coordination_is_away_nobody_can_be_asked(
    operator: APIClient, coordination_away: Any
) -> None:
    job = JobFactory(state="queued")
    hold(job)
    coordination_away("set_marks")
    told = problem_of(operator.post(url(job, "cancel"), {"abort": True}), 503)
    assert told["detail"] == "away"


@pytest.mark.parametrize(
    "body", [{"abort": "yes"}, {"abort": 1}, {"abort": None}, {"abrt": True}, []]
)
def test_how_to_cancel_is_said_exactly(operator: APIClient, body: Any) -> None:
    job = JobFactory()
    errors_of(operator.post(url(job, "cancel"), body))
    assert Job.objects.get().state == "pending"


def test_a_failed_job_is_requeued_and_the_signal_is_sent(
    operator: APIClient, hear: Any, django_capture_on_commit_callbacks: Any
) -> None:
    heard, job = hear("job_requeued"), JobFactory(failed=True)
    with django_capture_on_commit_callbacks(execute=True):
        answer = operator.post(url(job, "requeue"))
    assert answer.json()["outcome"] == "requeued"
    assert answer.json()["job"]["attempts"] == 0
    assert [each["job_id"] for each in heard] == [str(job.pk)]


def test_a_running_job_is_not_requeued(operator: APIClient) -> None:
    job = JobFactory(state="queued")
    hold(job)
    problem_of(operator.post(url(job, "requeue")), 409)


def test_a_job_of_later_runs_now(operator: APIClient) -> None:
    job = JobFactory(available_at=timezone.now() + timedelta(days=1))
    assert operator.post(url(job, "run-now")).json()["outcome"] == "due"
    assert operator.post(url(job, "run-now")).json()["outcome"] == "unchanged"
    problem_of(operator.post(url(JobFactory(completed=True), "run-now")), 409)
    assert LogEntry.objects.count() == 1


def test_a_job_moves_to_another_queue(operator: APIClient, greet: Any) -> None:
    job = JobFactory(handler="tests.greet", unique_id="u")
    answer = operator.post(url(job, "change-queue"), {"queue": "mails"})
    assert (answer.json()["outcome"], answer.json()["job"]["queue"]) == ("moved", "mails")
    assert "queue" in errors_of(operator.post(url(job, "change-queue"), {"queue": "mial"}))
    JobFactory(unique_id="u")
    problem_of(operator.post(url(job, "change-queue"), {"queue": "default"}), 409)


@pytest.mark.parametrize("action", ["cancel", "requeue", "run-now"])
def test_a_job_that_is_not_there_is_404(operator: APIClient, action: str) -> None:
    problem_of(operator.post(url(uuid.uuid4(), action)), 404)


def test_the_log_names_a_job_without_obeying_its_name(operator: APIClient) -> None:
    operator.post(url(JobFactory(handler="a\u202eb"), "cancel"))
    assert LogEntry.objects.get().object_repr.startswith("a\\u202eb ")


@pytest.mark.django_db
def test_what_may_quote_a_payload_needs_the_permission_for_payloads(login: Login) -> None:
    # Given
    job = JobFactory(failed=True, key="ada@example.org", unique_id="ada-1", error="no ada")
    JobFailureFactory(job=job, error="no ada", error_type="shop.NotFound")
    quoted = ("ada@example.org", "ada-1", "no ada")
    blind, seeing = login("view_job", "retry_job"), login("view_job", "retry_job", "view_payload")
    # When, then
    for ask in (
        lambda client: client.get("/kjo/jobs/"),
        lambda client: client.get(url(job)),
        lambda client: client.get(url(job, "wait")),
    ):
        hidden, shown = ask(blind).content.decode(), ask(seeing).content.decode()
        assert not [text for text in quoted if text in hidden]
        assert [text for text in quoted if text in shown] == list(quoted)
        assert "shop.NotFound" in hidden
    assert blind.get(url(job)).json()["failures"][0]["error_type"] == "shop.NotFound"
    requeued = blind.post(url(job, "requeue")).content.decode()
    assert not [text for text in quoted if text in requeued]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "query",
    [
        {"q": "error:ada"},
        {"q": "key:ada*"},
        {"q": "unique:ada-1"},
        {"key": "ada@example.org"},
        {"unique_id": "ada*"},
    ],
    ids=str,
)
def test_nor_is_it_found_by_guessing(login: Login, query: dict[str, str]) -> None:
    job = JobFactory(failed=True, key="ada@example.org", unique_id="ada-1", error="no ada")
    told = problem_of(login("view_job").get("/kjo/jobs/", query), 403)
    assert "takes the permission to see payloads" in told["detail"]
    (found,) = login("view_job", "view_payload").get("/kjo/jobs/", query).json()["results"]
    assert found["id"] == str(job.pk)


@pytest.mark.django_db
@pytest.mark.parametrize("word", ["ada@example.org", "ada-1", "no"])
def test_a_word_looks_where_the_user_may_look(login: Login, word: str) -> None:
    job = JobFactory(key="ada@example.org", unique_id="ada-1", error="no ada", handler="shop.send")
    blind = login("view_job")
    assert blind.get("/kjo/jobs/", {"q": word}).json()["results"] == []
    for own in ("shop", str(job.pk)):
        assert len(blind.get("/kjo/jobs/", {"q": own}).json()["results"]) == 1
    seeing = login("view_job", "view_payload")
    assert len(seeing.get("/kjo/jobs/", {"q": word}).json()["results"]) == 1


@pytest.mark.django_db
@pytest.mark.parametrize("action", ["requeue", "run-now"])
def test_an_internal_job_runs_again_for_who_may_do_what_it_does(
    action: str, login: Login, superuser: APIClient
) -> None:
    # Given what a superuser asked for, and that does not run
    actor = UserActor(superuser.user)
    job = start_bulk("discard_letters", DeadLetterFilter(), actor=actor, note="x")
    later = timezone.now() + timedelta(hours=1)
    state = "cancelled" if action == "requeue" else "failing"
    Job.objects.filter(pk=job.pk).update(state=state, available_at=later)
    # When, then
    answer = login("view_job", "retry_job").post(url(job, action), {}, format="json")
    assert "also needs the permission of its action" in problem_of(answer, 403)["detail"]
    entitled = login("view_job", "retry_job", "discard_dlq")
    assert entitled.post(url(job, action), {}, format="json").status_code == 200
    # And the log names who asked
    entry = LogEntry.objects.get(object_id=str(job.pk))
    assert entry.user == entitled.user


@pytest.mark.django_db
def test_the_expiry_of_a_job_is_changed_and_lifted(login: Login) -> None:
    # Given
    client, job = login("view_job", "retry_job"), JobFactory()
    address = f"/kjo/jobs/{job.pk}/change-expiry/"
    # When, then
    told = client.post(address, {"expires_in": 60}).json()
    assert told["outcome"] == "changed"
    assert told["job"]["expires_at"] is not None
    assert client.post(address, {"expires_in": None}).json()["job"]["expires_at"] is None
    assert client.post(address, {"expires_in": None}).json()["outcome"] == "unchanged"
    # And what would be anybody's guess is refused
    for body in ({}, {"expires_in": 0}, {"expires_in": "60"}, {"expires_in": 1e12}):
        problem_of(client.post(address, body), 400)
    Job.objects.update(state="completed")
    problem_of(client.post(address, {"expires_in": 60}), 409)
