"""What type checkers know of jobs: mypy reads this file along with the package, nobody runs it.

A line that must be an error has an ignore with that error's code; mypy refuses an ignore without
an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, assert_type

from django.db import models

from kjo_django import (
    BatchItem,
    JobContext,
    JobDefinition,
    JobHandle,
    Workflow,
    enqueue_on_save,
    group,
    job,
)
from kjo_django.enqueue.waiting import NO_RESULT, NoResult


@job
def refund(order_id: int, reason: str = "") -> float:
    return order_id / 2


@job(queue="mails", timeout=30, unique_for=60, backoff=[1, timedelta(minutes=1)])
async def remind(order_id: int) -> str:
    return f"{order_id}"


@job(takes_context=True, atomic=False)
def charge(context: JobContext, order_id: int, *, cents: int) -> None: ...


@job(takes_context=True)
async def call_partner(context: JobContext, order_id: int) -> list[int]:
    return [order_id]


@job(batch=100)
def index(items: list[BatchItem]) -> None: ...


def the_arguments_are_those_of_the_function() -> None:
    refund.enqueue(order_id=7)
    refund.enqueue(order_id=7, reason="broken")
    refund.enqueue(order_id="7")  # type: ignore[arg-type]
    refund.enqueue(order=7)  # type: ignore[call-arg]
    refund.enqueue()  # type: ignore[call-arg]
    remind.enqueue(order_id=7)
    remind.enqueue(order_id=7, cents=1)  # type: ignore[call-arg]
    charge.enqueue(order_id=7, cents=1)
    charge.enqueue(context=None, order_id=7, cents=1)  # type: ignore[call-arg]
    charge.enqueue(order_id=7)  # type: ignore[call-arg]
    index.enqueue(anything=7)


def the_result_is_that_of_the_function() -> None:
    handle = refund.enqueue(order_id=7)
    assert_type(handle, JobHandle[float])
    assert_type(handle.wait(), float)
    assert_type(handle.result, float | NoResult)
    if handle.result is not NO_RESULT:
        assert_type(handle.result, float)
    assert_type(remind.enqueue(order_id=7), JobHandle[str])
    assert_type(call_partner.enqueue(order_id=7), JobHandle[list[int]])
    assert_type(charge.enqueue(order_id=7, cents=1).wait(), None)
    assert_type(JobHandle.of("0190"), JobHandle[Any])
    assert_type(refund.enqueue_many([{"order_id": 7}]), list[JobHandle[float]])


async def so_it_is_in_asynchronous_code() -> None:
    handle = await remind.aenqueue(order_id=7)
    assert_type(await handle.await_(), str)
    assert_type(await handle.aresult(), str | NoResult)
    await remind.aenqueue(order=7)  # type: ignore[call-arg]


def options_are_known_and_keep_the_function() -> None:
    refund.using(delay=60, debounce_max=timedelta(hours=1)).enqueue(order_id=7)
    refund.using(delay=60).enqueue(order_id="7")  # type: ignore[arg-type]
    refund.using(dealy=60)  # type: ignore[call-arg]
    refund.using(quue="mails")  # type: ignore[call-arg]
    refund.using(priority="high")  # type: ignore[arg-type]
    refund.using(on_conflict="ignore")  # type: ignore[arg-type]
    refund.using(run_at="tomorrow")  # type: ignore[arg-type]
    job(retries=3)  # type: ignore[call-overload]
    job(max_attempts="3")  # type: ignore[call-overload]


def the_first_argument_of_a_handler_with_context_is_one() -> None:
    @job(takes_context=True)
    def of_any(context: Any, order_id: int) -> float:
        return order_id / 2

    of_any.enqueue(order_id="7")  # type: ignore[arg-type]

    @job(takes_context=True)  # type: ignore[type-var, arg-type]
    def forgotten(order_id: int) -> None: ...

    @job(takes_context=True)  # type: ignore[type-var]
    async def forgotten_by_a_coroutine(order_id: int) -> None: ...

    @job(takes_context=True)  # type: ignore[arg-type]
    def without_arguments() -> None: ...


def a_context_is_no_any(context: JobContext) -> None:
    assert_type(context.attempt, int)
    assert_type(context.idempotency_key, str)
    context.progres(50)  # type: ignore[attr-defined]
    context.progress("half")  # type: ignore[arg-type]
    context.workflow.results()  # type: ignore[union-attr]
    if context.workflow is not None:
        assert_type(list(context.workflow.results(refund)), list[float])
        assert_type(list(context.workflow.results("shop.refund")), list[Any])
        context.workflow.add(refund, on_failure="ignore", order_id=7)  # type: ignore[arg-type]


async def workflows_are_typed() -> None:
    with Workflow("import", on_failure="run") as workflow:
        first = workflow.add(refund, order_id=7)
        workflow.add(remind, after=first, on_failure="ignore")  # type: ignore[arg-type]
        workflow.add(remind, after="first")  # type: ignore[arg-type]
    Workflow("import", on_failure="ignore")  # type: ignore[arg-type]
    await group(refund.step(order_id=7)).aenqueue(name="refunds", on_failure="hold")
    await group(refund.step(order_id=7)).aenqueue(nmae="refunds")  # type: ignore[call-arg]


def a_hook_knows_its_model(model: type[models.Model]) -> None:
    def payload_of_text(instance: str) -> Mapping[str, Any]:
        return {"order_id": int(instance)}

    enqueue_on_save(model, refund, payload=lambda instance: {"order_id": instance.pk})
    enqueue_on_save(model, refund, payload=payload_of_text)  # type: ignore[arg-type]


def any_job_may_be_passed_on(model: Any) -> None:
    def payload(instance: Any) -> Mapping[str, Any]:
        return {"order_id": instance.pk}

    jobs: list[JobDefinition[..., Any]] = [refund, remind, charge, index]
    for each in jobs:
        enqueue_on_save(model, each, payload=payload)
