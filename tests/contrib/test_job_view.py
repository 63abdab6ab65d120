"""The view of a user's own job: JSON, fragments for htmx, server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import types
import uuid
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth import get_user_model
from django.db import connection, connections
from django.http import HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils import timezone

from kjo_django import registry
from kjo_django.contrib import job_view
from kjo_django.contrib.job_view import Board, JobView
from kjo_django.engine.handler.running import dump_progress
from kjo_django.enqueue.job_status import progress_name
from kjo_django.messages.serializers import dump_result
from kjo_django.models import Job
from kjo_django.runtime import get_coordination
from kjo_django.testing import drain
from tests.factories import JobFactory

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/show-a-user-their-job.md"
BLOCK = re.compile(
    r"^```\w+\n(?:#|<!--) (shop/[\w.]+)(?: -->)?\n(.*?)^```", re.MULTILINE | re.DOTALL
)
HOUR = timedelta(hours=1)


def owns(request: Any, job: Job) -> bool:
    return (job.headers or {}).get("owner") == request.headers.get("X-User")


async def owns_slowly(request: Any, job: Job) -> bool:
    return owns(request, job)


urlpatterns = [
    path("mine/<str:id>/", JobView.as_view(may_see=owns)),
    path("async/<str:id>/", JobView.as_view(may_see=owns_slowly)),
    path("all/<uuid:id>/", JobView.as_view(may_see=owns, shows=["result", "error", "payload"])),
    path("short/<uuid:id>/", JobView.as_view(may_see=owns, stream_seconds=0.2)),
    path("nobody/<uuid:id>/", JobView.as_view()),
    path("response/<uuid:id>/", JobView.as_view(may_see=lambda *_: HttpResponse(status=403))),
]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
ADA = {"X-User": "ada"}


def ada_s(**columns: Any) -> Job:
    job: Job = JobFactory(**{"headers": {"owner": "ada"}, **columns})
    return job


def get(job: Job | uuid.UUID | str, place: str = "mine", **headers: str) -> Any:
    id = job.pk if isinstance(job, Job) else job
    return Client().get(f"/{place}/{id}/", headers={**ADA, **headers})


# --- Who sees what --------------------------------------------------------------------------------


def test_an_owner_sees_status_and_progress_and_nothing_else() -> None:
    job = ada_s(state="failing", attempts=1, error="card 4711 refused")
    get_coordination().set_marks({progress_name(str(job.pk)): dump_progress(42, "half")}, HOUR)
    answer = get(job)
    assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")
    assert answer.json() == {
        "id": str(job.pk),
        "status": "failing",
        "is_final": False,
        "created_at": job.created_at.isoformat(),
        "finished_at": None,
        "progress": {"percent": 42, "text": "half"},
    }
    assert "no-cache" in answer["Cache-Control"]
    assert "private" in answer["Cache-Control"]
    assert {"Accept", "HX-Request", "Cookie"} <= set(answer["Vary"].split(", "))


def test_what_is_named_is_shown_and_secrets_are_not() -> None:
    kept = {"result_expires_at": timezone.now() + HOUR}
    done = ada_s(completed=True, result=dump_result({"rows": 7, "token": "t"}), **kept)
    failed = ada_s(failed=True, error="no route", **kept)
    shown = get(done, "all").json()
    assert shown["result"] == {"rows": 7, "token": "[redacted]"}
    assert "payload" in shown
    assert "error" not in shown
    assert get(failed, "all").json()["error"] == "no route"
    # And a result that is no longer kept is gone
    Job.objects.update(result_expires_at=timezone.now() - HOUR)
    assert "result" not in get(done, "all").json()
    assert "error" not in get(failed, "all").json()


def test_unknown_and_forbidden_are_one_answer() -> None:
    job = ada_s()
    unknown = get(uuid.uuid4())
    assert unknown.status_code == 404
    for answer in (
        get(job, **{"X-User": "bob"}),
        get(job, "nobody"),
        get(job, "response"),
        get("x"),
        get("%00"),
        get(JobFactory(headers=None)),
        get(job, "async", **{"X-User": "bob"}),
    ):
        assert (answer.status_code, answer.content) == (404, unknown.content)
        assert dict(answer.headers) == dict(unknown.headers)


def test_a_coroutine_function_may_decide() -> None:
    assert get(ada_s(), "async").status_code == 200


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"shows": "result"}, ValueError),
        ({"shows": ["results"]}, ValueError),
        ({"may_see": None}, TypeError),
        ({"may_see": True}, TypeError),
        ({"maysee": owns}, TypeError),
    ],
)
def test_what_means_nothing_is_refused_where_it_is_declared(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        JobView.as_view(**wrong)


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
def test_it_changes_nothing(method: str) -> None:
    answer = getattr(Client(), method)(f"/mine/{ada_s().pk}/", headers=ADA)
    assert answer.status_code == 405


# --- Polling --------------------------------------------------------------------------------------


def test_an_unchanged_job_is_not_sent_again() -> None:
    job = ada_s()
    first = get(job)
    again = get(job, **{"If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again["Retry-After"] == first["Retry-After"] == "1"
    Job.objects.update(state="cancelled", finished_at=timezone.now())
    ended = get(job, **{"If-None-Match": first["ETag"]})
    assert (ended.status_code, ended.json()["status"]) == (200, "cancelled")
    assert "Retry-After" not in ended


@pytest.mark.parametrize(
    ("age", "due", "pause"),
    [(1, 0, "1"), (30, 0, "2"), (300, 0, "5"), (4000, 0, "15"), (4000, 20, "20"), (1, 9000, "60")],
)
def test_the_longer_it_lasts_the_less_often_it_is_asked_for(age: int, due: int, pause: str) -> None:
    now = timezone.now()
    at = now + timedelta(seconds=due - 0.5) if due else now - timedelta(seconds=age)
    job = ada_s(state="pending", created_at=now - timedelta(seconds=age), available_at=at)
    assert get(job)["Retry-After"] == pause


def test_htmx_gets_a_fragment_that_asks_for_the_next_one() -> None:
    job = ada_s()
    evil = "<script>alert(1)</script>"
    get_coordination().set_marks({progress_name(str(job.pk)): dump_progress(42.4, evil)}, HOUR)
    text = get(job, **{"HX-Request": "true"}).content.decode()
    assert f'hx-get="/mine/{job.pk}/" hx-trigger="every 1s" hx-swap="outerHTML"' in text
    assert '<progress max="100" value="42"' in text
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    # And the last one asks for nothing
    ended = {"state": "completed", "result": dump_result({"a": evil})}
    Job.objects.update(**ended, result_expires_at=timezone.now() + HOUR)
    text = get(job, "all", **{"HX-Request": "true"}).content.decode()
    assert "Completed" in text
    assert "hx-" not in text
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


# --- Server-sent events ---------------------------------------------------------------------------

EVENTS = {"Accept": "text/event-stream"}


def events_in(text: str) -> list[dict[str, str]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


def test_under_wsgi_each_answer_is_one_event_and_the_browser_asks_again() -> None:
    job = ada_s()
    answer = get(job, **EVENTS)
    assert answer["Content-Type"].startswith("text/event-stream")
    retry, event = events_in(answer.content.decode())
    assert retry == {"retry": "1000"}
    assert json.loads(event["data"])["status"] == job.state
    # When nothing has changed, a comment is all
    again = get(job, **EVENTS, **{"Last-Event-ID": event["id"]})
    assert events_in(again.content.decode()) == [{"retry": "1000"}]
    # When it has ended, the event says so, and whoever has it need not ask again
    Job.objects.update(state="cancelled", finished_at=timezone.now())
    _, last = events_in(get(job, **EVENTS).content.decode())
    assert last["event"] == "end"
    assert get(job, **EVENTS, **{"Last-Event-ID": last["id"]}).status_code == 204
    assert get(job, **EVENTS, **{"X-User": "bob"}).status_code == 404


def run(view: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function. What is synchronous runs on this thread, with its connections."""

    async def within_a_minute() -> Any:
        return await asyncio.wait_for(view(), 60)

    return async_to_sync(within_a_minute)()


async def opened(job: Job, place: str = "mine") -> Any:
    answer = await AsyncClient().get(f"/{place}/{job.pk}/", headers={**ADA, **EVENTS})
    assert answer.status_code == 200
    assert answer.streaming
    return answer


async def read_to_the_end(answer: Any) -> list[dict[str, str]]:
    chunks = [chunk.decode() async for chunk in answer]
    return events_in("".join(chunks))


def test_under_asgi_changes_arrive_until_the_end(
    real_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "INTERVAL", 0.05)
    monkeypatch.setattr(job_view, "HEARTBEAT", 0.05)
    job = ada_s()

    def change(**columns: Any) -> None:
        Job.objects.filter(pk=job.pk).update(**columns)

    async def view() -> list[str]:
        chunks = []
        async for chunk in await opened(job):
            text = chunk.decode()
            chunks.append(text)
            if text.startswith(": "):  # a heartbeat: nothing has changed for a while
                is_first = not any("failing" in each for each in chunks)
                state = "failing" if is_first else "completed"
                await sync_to_async(change)(state=state)
        return chunks

    chunks = run(view)
    events = events_in("".join(chunks))
    states = [json.loads(event["data"])["status"] for event in events if "data" in event]
    assert states == [job.state, "failing", "completed"]
    assert events[-1]["event"] == "end"
    assert any(chunk.startswith(": ") for chunk in chunks)
    assert Board.viewer_count == 0


def test_many_viewers_are_served_by_one_reader_that_ends_with_them(
    real_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "INTERVAL", 0.05)
    jobs = [ada_s() for _ in range(3)]
    reads: list[int] = []
    read = job_view.read

    def counted(ids: Any, shows: Any) -> Any:
        reads.append(len(ids))
        return read(ids, shows)

    async def view() -> list[list[dict[str, str]]]:
        answers = [await opened(job) for job in jobs * 4]
        monkeypatch.setattr(job_view, "read", counted)
        viewers = [asyncio.create_task(read_to_the_end(answer)) for answer in answers]
        while 3 not in reads:
            await asyncio.sleep(0.01)
        await sync_to_async(Job.objects.update)(state="cancelled")
        return await asyncio.gather(*viewers)

    found = run(view)
    assert all(events[-1]["event"] == "end" for events in found)
    assert max(reads) == 3
    assert Board.viewer_count == 0


def test_a_stream_ends_by_itself_and_a_deleted_job_ends_it(
    real_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "INTERVAL", 0.05)
    short, deleted = ada_s(), ada_s()

    async def view() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        first = await read_to_the_end(await opened(short, "short"))
        answer = await opened(deleted)
        await sync_to_async(Job.objects.filter(pk=deleted.pk).delete)()
        return first, await read_to_the_end(answer)

    first, second = run(view)
    assert [event.get("event") for event in first] == [None, None]
    assert second[-1] == {"event": "end", "data": "null"}


def test_an_outage_of_the_database_is_waited_out(
    real_database: str, monkeypatch: pytest.MonkeyPatch, failing: Any
) -> None:
    from django.db import OperationalError

    monkeypatch.setattr(job_view, "INTERVAL", 0.05)
    job = ada_s()

    async def view() -> list[dict[str, str]]:
        answer = await opened(job)
        left = failing(job_view, "read", OperationalError("gone"), OperationalError("gone"))
        viewer = asyncio.create_task(read_to_the_end(answer))
        while left:
            await asyncio.sleep(0.01)
        await sync_to_async(Job.objects.update)(state="cancelled")
        return await viewer

    assert run(view)[-1]["event"] == "end"


def test_beyond_so_many_streams_browsers_ask_again(
    real_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "MAX_VIEWERS", 0)
    job = ada_s()

    async def view() -> Any:
        return await AsyncClient().get(f"/mine/{job.pk}/", headers={**ADA, **EVENTS})

    answer = run(view)
    assert not answer.streaming
    assert events_in(answer.content.decode())[0] == {"retry": "1000"}


@pytest.mark.postgres
def test_viewers_hold_no_database_sessions(postgres: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten streams hold the reader's one."""
    monkeypatch.setattr(job_view, "INTERVAL", 0.05)
    job = ada_s()

    # Given sessions that threads of earlier tests may hold
    before = sessions()

    async def view() -> int:
        answers = [await opened(job) for _ in range(10)]
        viewers = [asyncio.create_task(read_to_the_end(answer)) for answer in answers]
        await asyncio.sleep(0.5)
        held = await sync_to_async(sessions)()
        await sync_to_async(Job.objects.update)(state="cancelled")
        await asyncio.gather(*viewers)
        return len(held - before)

    assert run(view) <= 2
    connections.close_all()


def sessions() -> set[int]:
    """The sessions of others on the test's database, by their processes."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return {pid for (pid,) in cursor.fetchall()}


# --- The page of the documentation ----------------------------------------------------------------


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[types.ModuleType]:
    """The modules that the page shows; its URLs."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    for name in ("jobs", "views", "urls"):
        module = types.ModuleType(f"shop.{name}")
        monkeypatch.setitem(sys.modules, f"shop.{name}", module)
        setattr(sys.modules["shop"], name, module)
        exec(compile(blocks[f"shop/{name}.py"], PAGE.name, "exec"), vars(module))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/export.html").write_text(blocks["shop/export.html"])
    yield sys.modules["shop.urls"]
    registry.unregister(sys.modules["shop.jobs"].export_orders.name)


def test_the_pages_code_shows_a_user_their_export(
    shop: types.ModuleType, tmp_path: Path, settings: Any
) -> None:
    # Given two users, of whom one asks for an export
    ada, bob = (get_user_model().objects.create_user(name) for name in ("ada", "bob"))
    client, other = Client(), Client()
    client.force_login(ada)
    other.force_login(bob)
    htmx = {"HX-Request": "true"}
    templates = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    with override_settings(ROOT_URLCONF=shop, TEMPLATES=templates):
        page = client.post("/exports/").content.decode()
        address = re.search(r'hx-get="(/exports/[0-9a-f-]+/)"', page)[1]
        # When its page asks for the fragment, the job is shown until it has ended
        assert "hx-trigger=" in client.get(address, headers=htmx).content.decode()
        drain()
        assert "&quot;orders&quot;: 100" in client.get(address, headers=htmx).content.decode()
        assert client.get(address).json()["result"] == {"orders": 100}
        # And others see nothing
        assert other.get(address).status_code == Client().get(address).status_code == 404
