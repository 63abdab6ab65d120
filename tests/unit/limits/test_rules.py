"""Limits are refused where they are declared, with the place of the fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from kjo_django import job, registry
from kjo_django.conf import get_settings
from kjo_django.limits.control import clear_limit, overview, set_limit
from kjo_django.limits.rules import Limit, limits_of
from kjo_django.models import LimitControl
from kjo_django.runtime import current_runtime
from kjo_django.values import Rate, rate


@pytest.fixture(autouse=True)
def _declared() -> Any:
    with registry.isolated():
        yield


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("5/s", Rate(5, 1)),
        (" 100 / m ", Rate(100, 60)),
        ("1000/h", Rate(1000, 3600)),
        ("10/30s", Rate(10, 30)),
        ("1/31d", Rate(1, 31 * 86_400)),
    ],
)
def test_a_rate_is_read(text: str, read: Rate) -> None:
    assert rate(text) == read
    assert rate(str(read)) == read


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("5", "it has no '/'"),
        ("five/s", "'five' before the '/' is no whole number"),
        ("-5/s", "'-5' before the '/' is no whole number"),
        ("5/week", "'week' after the '/' is no time"),
        ("5/1.5s", "'1.5s' after the '/' is no time"),
        ("0/s", "0 is not from 1 to 1,000,000"),
        ("5/0s", "its time must be from 1 second to 31 days"),
        ("5/32d", "its time must be from 1 second to 31 days"),
        (5, "a rate such as"),
        ("٥/s", "before the '/' is no whole number"),
    ],
)
def test_a_wrong_rate_is_refused_with_its_fault(text: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        rate(text)
    with pytest.raises(ValueError, match=rf"job\(rate={re.escape(repr(text))}\): rate must be"):
        job(rate=text)


def test_starts_are_spread_over_a_little_more_than_their_time() -> None:
    assert Rate(5, 1).interval == pytest.approx(0.203)
    assert Rate(100, 60).interval == pytest.approx(0.609)


def test_what_was_late_is_caught_up_within_half_of_the_time() -> None:
    assert Rate(5, 1).ahead == pytest.approx(0.5)
    assert Rate(100, 60).ahead == pytest.approx(0.609)
    assert Rate(1, 1).ahead == pytest.approx(0.5)
    assert Rate(5, 1, burst=6).ahead == pytest.approx(5 * 0.203)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"burst": 3}, ValueError, "burst means nothing without rate"),
        ({"rate_key": "a"}, ValueError, "rate_key means nothing without rate"),
        ({"concurrency_key": "a"}, ValueError, "concurrency_key means nothing without concurrency"),
        ({"concurrency": 0}, ValueError, "concurrency must be a whole number from 1 to 1,000"),
        ({"concurrency": 1001}, ValueError, "concurrency must be a whole number from 1 to 1,000"),
        ({"rate": "5/s", "burst": 0}, ValueError, "burst must be a whole number"),
        ({"rate": "5/s", "rate_key": 7}, ValueError, "rate_key must be the name of an argument"),
        ({"rates": "5/s"}, TypeError, "Did you mean 'rate'?"),
    ],
)
def test_wrong_options_are_refused(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        job(**options)


@pytest.mark.parametrize("option", ["rate_key", "concurrency_key"])
def test_a_key_is_an_argument_of_the_function(option: str) -> None:
    options: Any = {"rate": "5/s", "concurrency": 2, option: "tenant"}
    with pytest.raises(ImproperlyConfigured, match=f"{option}='tenant' is not an argument"):

        @job(name="limits.wrong_key", **options)
        def call(tenant_id: int) -> None: ...


def test_a_queues_rate_is_checked(settings: Any) -> None:
    settings.KJO = {"QUEUES": {"mail": {"rate": "5/week", "burst": 0}}}
    found = [message.msg for message in checks.run_checks(tags=["kjo"])]
    assert any("KJO['QUEUES']['mail']['rate'] must be a rate such as" in text for text in found)
    assert any("KJO['QUEUES']['mail']['burst'] must be" in text for text in found)


def limits(handler: Any, queue: str = "default", **payload: Any) -> list[Limit]:
    data = handler.handler.options.serializer.dumps(payload)
    conf = get_settings().queue(queue)
    return limits_of(current_runtime(), handler.handler, conf, data, "application/json")


def test_a_job_has_the_limits_of_its_handler_and_queue(settings: Any) -> None:
    settings.KJO = {"QUEUES": {"default": {"rate": "10/s", "burst": 4}}}

    @job(
        name="limits.all",
        rate="5/s",
        burst=2,
        rate_key="tenant",
        concurrency=3,
        concurrency_key=lambda tenant: f"<{tenant}>",
    )
    def call(tenant: str) -> None: ...

    assert limits(call, tenant="acme") == [
        Limit("SLOT:job:limits.all:<acme>", slots=3),
        Limit("RATE:job:limits.all:acme", Rate(5, 1, 2)),
        Limit("RATE:queue:default", Rate(10, 1, 4)),
    ]


@pytest.mark.parametrize("key", ["x" * 500, "a\0b", "\ud800", "é" * 121])
def test_any_key_makes_a_name_that_every_backend_takes(key: str) -> None:
    @job(name="limits.hostile", rate="5/s", rate_key=lambda tenant: key)
    def call(tenant: str) -> None: ...

    (limit,) = limits(call, tenant="a")
    assert len(limit.name) <= 255
    assert limit.name.encode().isascii()


def test_a_key_that_cannot_be_told_is_none() -> None:
    @job(name="limits.broken", rate="5/s", rate_key=lambda tenant: tenant["id"])
    def call(tenant: str) -> None: ...

    assert [limit.name for limit in limits(call, tenant="a")] == ["RATE:job:limits.broken"]


# --- Operators ------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_what_an_operator_asks_wins() -> None:
    @job(name="limits.asked", rate="5/s", concurrency=2)
    def call() -> None: ...

    assert set_limit("job:limits.asked", rate="1/m", actor="anna")
    assert not set_limit("job:limits.asked", rate="1/m")
    assert set_limit("job:limits.asked", burst=3, concurrency=7)
    (found,) = [each for each in overview() if each["name"] == "job:limits.asked"]
    assert found["declared"] == {"rate": "5/s", "burst": 1, "concurrency": 2}
    assert found["asked"] == {"rate": "1/m", "burst": 3, "concurrency": 7}
    assert (found["rate"], found["burst"], found["concurrency"]) == ("1/m", 3, 7)
    assert found["waiting_count"] == 0
    assert clear_limit("job:limits.asked")
    assert not clear_limit("job:limits.asked")
    assert not LimitControl.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("job:nothing", {"rate": "5/s"}, ValueError, "No job is named 'nothing'"),
        ("queue:ledgre", {"rate": "5/s"}, ValueError, "Did you mean 'ledger'?"),
        ("default", {"rate": "5/s"}, ValueError, "A limit is named queue:… or job:…"),
        ("queue:ledger", {"rate": "5"}, ValueError, "rate must be a rate such as"),
        ("queue:ledger", {"concurrency": 3}, ValueError, "concurrency must be of a job"),
        ("queue:ledger", {"rates": "5/s"}, TypeError, "Did you mean 'rate'?"),
    ],
)
def test_what_means_nothing_is_refused(name: str, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        set_limit(name, **options)


@pytest.mark.django_db
def test_every_snippet_of_the_page_runs() -> None:
    page = Path(__file__).parents[3] / "docs/how-to/limits.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "shop.jobs"}
    for block in blocks:
        block = block.replace("queue:mail", "queue:ledger").replace("job:shop", "job:shop.jobs")
        exec(block, names)
    assert get_settings() is not None
    assert {"shop.jobs.sync", "shop.jobs.import_catalogue"} <= set(registry.limited)
