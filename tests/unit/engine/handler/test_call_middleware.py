"""Middleware: what it may see and do around handlers of every kind, and what is refused."""

from __future__ import annotations

import asyncio
import threading
import time
import types
from datetime import timedelta
from pathlib import Path

import pytest
from asgiref.sync import iscoroutinefunction
from django.core.exceptions import MiddlewareNotUsed
from django.utils.decorators import (
    async_only_middleware,
    sync_and_async_middleware,
    sync_only_middleware,
)

from kjo_django import registry
from kjo_django.checks import check_settings
from kjo_django.contrib.logging import JobContextFilter
from kjo_django.engine.handler.context import BatchContext
from kjo_django.exceptions import PermanentError
from kjo_django.messages.serializers import load_result, serializer_for
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.testing import perform
from tests.docs.test_docs import FENCE
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench, as_job, entries
from tests.waiting import wait_until

PLACE = "tests.unit.engine.handler.test_call_middleware"
seen: list[object] = []


def outer(call_next):
    def middleware(context):
        seen.append("outer in")
        try:
            return call_next(context)
        finally:
            seen.append("outer out")

    return middleware


def noting(call_next):
    seen.append("made")

    def middleware(context):
        seen.append(context)
        return call_next(context)

    return middleware


def tenant(call_next):
    def middleware(context):
        seen.append(context.headers["tenant"])
        return call_next(context)

    return middleware


def writing(call_next):
    def middleware(context):
        Entry.objects.create(job=f"before {context.payload['job']}")
        return call_next(context)

    return middleware


def refusing(call_next):
    def middleware(context):
        raise PermanentError("not for this tenant")

    return middleware


def forgiving(call_next):
    def middleware(context):
        try:
            return call_next(context)
        except ValueError as error:
            return f"forgave {error}"

    return middleware


def sleeping(call_next):
    def middleware(context):
        wait_until(lambda: context.aborted)
        time.sleep(0.001)  # sleep: lets the watch raise what it has announced
        return call_next(context)

    return middleware


def unused(call_next):
    raise MiddlewareNotUsed


def returning_none(call_next):
    return None


@sync_and_async_middleware
def either(call_next):
    if iscoroutinefunction(call_next):

        async def middleware(context):
            seen.append("awaited")
            return await call_next(context)

    else:

        def middleware(context):
            seen.append("called")
            return call_next(context)

    return middleware


@async_only_middleware
def asynchronous(call_next):
    async def middleware(context):
        await asyncio.sleep(0)
        seen.append("awaited")
        return await call_next(context)

    return middleware


@sync_only_middleware
def synchronous(call_next):
    def middleware(context):
        seen.append(threading.get_ident())
        return call_next(context)

    return middleware


def named(*middleware) -> list[str]:
    return [f"{PLACE}.{each.__name__}" for each in middleware]


@pytest.fixture
def surrounded(sqlite_file, settings, forgotten_definitions):
    """A worker whose handlers are surrounded by some middleware."""
    seen.clear()
    benches = []

    def make(*middleware) -> Bench:
        settings.KJO = KJO | MEMORY | {"MIDDLEWARE": named(*middleware)}
        benches.append(Bench())
        return benches[-1]

    yield make
    for bench in benches:
        bench.pipeline.close(10)
        bench.close()


def write(job: str) -> str:
    Entry.objects.create(job=job)
    seen.append(f"wrote {job}")
    return job


async def awrite(job: str) -> str:
    await Entry.objects.acreate(job=job)
    seen.append(f"wrote {job}")
    return job


def result_of(job: Job) -> object:
    return load_result(bytes(job.result), serializer_for(job.content_type))


def test_the_first_that_is_named_stands_outermost(surrounded):
    bench = surrounded(outer, noting)
    as_job(write).enqueue(job="a")
    bench.run()
    made, begun, context, wrote, ended = seen
    assert [made, begun, wrote, ended] == ["made", "outer in", "wrote a", "outer out"]
    assert context.payload == {"job": "a"}
    assert (context.handler, context.queue, context.attempt) == ("bench.write", "ledger", 1)
    assert context.log_fields["job_id"] == context.job_id == str(Job.objects.get().pk)
    assert context.time_limit == 1800


def test_each_handler_has_its_middleware_made_once(surrounded):
    bench = surrounded(noting)
    for name in "abc":
        as_job(write).enqueue(job=name)
    bench.run()
    assert seen.count("made") == 1
    assert entries() == {"a": 1, "b": 1, "c": 1}


def test_headers_are_there_though_the_handler_asks_for_no_context(surrounded):
    bench = surrounded(tenant)
    as_job(write).using(headers={"tenant": "acme"}).enqueue(job="a")
    bench.run()
    assert seen == ["acme", "wrote a"]


@pytest.mark.parametrize("atomic", [True, False])
def test_what_it_raises_is_the_error_of_the_attempt(surrounded, atomic):
    bench = surrounded(outer, refusing)
    as_job(write, atomic=atomic).enqueue(job="a")
    bench.run()
    letter = DeadLetter.objects.get()
    assert (letter.error, letter.attempts) == ("not for this tenant", 1)
    assert seen == ["outer in", "outer out"]
    assert not entries()


def test_what_it_writes_is_undone_with_the_handlers_writes(surrounded):
    def fail(job: str) -> None:
        Entry.objects.create(job=job)
        if job == "b":
            raise ValueError("no")

    bench = surrounded(writing)
    as_job(fail).enqueue_many([{"job": name} for name in "abc"])
    bench.run()
    assert entries() == {"before a": 1, "a": 1, "before c": 1, "c": 1}


def test_what_it_returns_is_the_result_and_what_it_swallows_is_success(surrounded):
    def fail() -> None:
        raise ValueError("this")

    bench = surrounded(forgiving)
    as_job(fail).enqueue()
    bench.run()
    job = Job.objects.get()
    assert (job.state, result_of(job)) == ("completed", "forgave this")


def test_its_time_counts_and_it_is_interrupted_like_the_handler(surrounded):
    bench = surrounded(sleeping)
    as_job(write, timeout=timedelta(seconds=0.05), max_attempts=2).enqueue(job="a")
    bench.run()
    assert "exceeded its timeout of 0.05 s" in JobFailure.objects.get().error
    assert not entries()


def test_a_middleware_may_ask_to_be_left_out(surrounded):
    bench = surrounded(unused, outer)
    as_job(write).enqueue(job="a")
    bench.run()
    assert seen == ["outer in", "wrote a", "outer out"]


def test_perform_runs_it_too(surrounded):
    surrounded(outer)
    assert perform(as_job(write), job="a") == "a"
    assert seen == ["outer in", "wrote a", "outer out"]


# --- Batches --------------------------------------------------------------------------------------


def test_a_batch_is_one_call_whose_context_has_what_its_items_share(surrounded):
    # Given
    def index(batch) -> None:
        for item in batch:
            write(**item.payload)

    bench = surrounded(noting)
    handler = as_job(index, batch=10)
    for name, shade in (("a", "red"), ("b", "blue")):
        handler.using(headers={"tenant": "acme", "shade": shade}).enqueue(job=name)
    # When
    bench.run()
    # Then
    (context,) = [each for each in seen if isinstance(each, BatchContext)]
    assert context.payload == [{"job": "a"}, {"job": "b"}]
    assert [item.headers["shade"] for item in context.items] == ["red", "blue"]
    assert context.headers["tenant"] == "acme" and "shade" not in context.headers
    assert (context.handler, context.queue) == ("bench.index", "ledger")
    assert context.log_fields["handler"] == "bench.index"
    assert "job_id" not in context.log_fields


def test_a_mixed_batch_that_is_refused_runs_one_by_one(surrounded):
    # Given
    def index(batch) -> None:
        for item in batch:
            write(**item.payload)

    bench = surrounded(tenant)
    handler = as_job(index, batch=10)
    for name in ("acme", "globex"):
        handler.using(headers={"tenant": name}).enqueue(job=name)
    # When
    bench.run()
    # Then
    assert seen == ["acme", "wrote acme", "globex", "wrote globex"]
    assert entries() == {"acme": 1, "globex": 1}


# --- Asynchronous handlers ------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 10], ids=["single", "batch"])
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("middleware", [either, asynchronous], ids=lambda each: each.__name__)
def test_asynchronous_middleware_surrounds_coroutines(surrounded, middleware, atomic, batch):
    async def index(items) -> None:
        for item in items:
            await awrite(**item.payload)

    bench = surrounded(middleware)
    as_job(index if batch else awrite, atomic=atomic, batch=batch).enqueue(job="a")
    bench.run()
    assert seen == ["awaited", "wrote a"]
    assert entries() == {"a": 1}


def test_a_synchronous_one_surrounds_a_coroutine_in_a_transaction_from_its_thread(surrounded):
    bench = surrounded(synchronous, asynchronous)
    as_job(awrite).enqueue(job="a")
    bench.run()
    assert seen == [threading.get_ident(), "awaited", "wrote a"]
    assert entries() == {"a": 1}


def test_a_coroutine_behind_synchronous_middleware_keeps_its_time_limit(surrounded):
    async def wait() -> None:
        await asyncio.sleep(60)

    bench = surrounded(synchronous)
    as_job(wait, timeout=timedelta(seconds=0.05)).enqueue()
    bench.run()
    assert "exceeded its timeout of 0.05 s" in JobFailure.objects.get().error


REFUSED = {
    "plain around coroutines on one loop": (
        awrite,
        {"atomic": False},
        [outer],
        "which is not asynchronous",
    ),
    "asynchronous around a function": (write, {}, [asynchronous], "which is only asynchronous"),
    "asynchronous around a plain one": (
        awrite,
        {},
        [asynchronous, synchronous],
        "which is only asynchronous",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_the_checks_and_at_run_time(surrounded, case):
    function, options, middleware, why = REFUSED[case]
    bench = surrounded(*middleware)
    for declared in registry.handlers():
        registry.unregister(declared.name)
    as_job(function, **options).enqueue(job="a")
    (found,) = check_settings()
    assert found.id == "kjo.E014"
    assert why in found.msg and f"bench.{function.__name__}" in found.msg
    # And when nobody has run the checks
    bench.run()
    assert why in JobFailure.objects.get().error
    assert not entries()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"{PLACE}.missing", "cannot be imported"),
        ("nowhere.at.all", "cannot be imported"),
        (f"{PLACE}.PLACE", "cannot be called"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_of_the_checks(settings, path, why):
    settings.KJO = KJO | MEMORY | {"MIDDLEWARE": [path]}
    (found,) = check_settings()
    assert found.id == "kjo.E014"
    assert why in found.msg


def test_one_that_returns_nothing_says_so(surrounded):
    bench = surrounded(returning_none)
    as_job(write).enqueue(job="a")
    bench.run()
    assert "must return a function, not None" in JobFailure.objects.get().error


# --- The pages ------------------------------------------------------------------------------------

HOW_TO = Path(__file__).resolve().parents[4] / "docs" / "how-to"


def code_of(page: str, file: str) -> list[str]:
    """The blocks of a page that begin with a file's name."""
    blocks = [code for _, _, code in FENCE.findall((HOW_TO / page).read_text())]
    return [code for code in blocks if code.startswith(f"# {file}\n")]


@pytest.fixture
def shop(monkeypatch):
    """The modules that the pages speak of."""

    def module(name: str, **names: object) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(__import__("sys").modules, name, made)
        return made

    module("shop")
    return module


def test_the_middleware_of_the_page_runs(surrounded, shop, settings, caplog):
    # Given
    class Used:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(self.name)

        def __exit__(self, *error: object) -> None:
            seen.append("left")

    shop("shop.tenants", use_tenant=Used)
    page = shop("shop.middleware")
    for code in code_of("middleware.md", "shop/middleware.py"):
        exec(compile(code, "middleware.md", "exec"), vars(page))
    caplog.set_level("INFO", "shop.jobs")
    caplog.handler.addFilter(JobContextFilter())
    bench = surrounded()
    settings.KJO = {
        **settings.KJO,
        "MIDDLEWARE": ["shop.middleware.timing", "shop.middleware.tenant"],
    }
    # When
    for function in (write, awrite):
        as_job(function).using(headers={"tenant": "acme"}).enqueue(job=function.__name__)
    bench.close()
    Bench().run()
    # Then
    assert seen == ["acme", "wrote write", "left", "acme", "wrote awrite", "left"]
    assert [record.handler for record in caplog.records] == ["bench.write", "bench.awrite"]
    assert "bench.write took 0." in caplog.text


def test_the_serializer_of_the_page_runs(surrounded, shop):
    # Given
    page = shop("shop.serializers")
    (code,) = code_of("serializers.md", "shop/serializers.py")
    exec(compile(code, "serializers.md", "exec"), vars(page))
    bench = surrounded()

    def build_report(rows: list[dict[str, str]]) -> dict[str, int]:
        return {"count": len(rows)}

    rows = [{"name": "x" * 100}] * 10
    # When
    as_job(build_report, serializer=page.GZIPPED_JSON).enqueue(rows=rows)
    bench.run()
    # Then
    job = Job.objects.get()
    assert job.state == "completed"
    assert job.content_type == page.GzippedJson.content_type
    assert len(bytes(job.payload)) < 200
    assert result_of(job) == {"count": 10}
    # And what it cannot read is a dead letter
    bench.publish(
        b"no gzip",
        kjo_id="m",
        kjo_type="bench.build_report",
        content_type=page.GzippedJson.content_type,
    )
    bench.run()
    assert "Not valid gzip" in DeadLetter.objects.get().error
    assert serializer_for(page.GzippedJson.content_type) is page.GZIPPED_JSON
