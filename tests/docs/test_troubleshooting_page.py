"""What docs/how-to/troubleshooting.md quotes is what the code says, and no state is missing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from kjo_django import job, registry
from kjo_django.checks import check_settings
from kjo_django.models import DeadLetterReason
from kjo_django.operations.monitoring import health
from kjo_django.states import JobStatus
from tests.factories import WorkerFactory

pytestmark = [pytest.mark.medium, pytest.mark.django_db]

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/troubleshooting.md"
TEXT = PAGE.read_text()


@pytest.fixture(autouse=True)
def shop(settings: Any) -> Any:
    """The jobs of the page."""
    with registry.isolated():
        settings.KJO = {"QUEUES": {"mails": {}, "reports": {}}}

        @job(name="shop.write_receipt", max_attempts=3)
        def write_receipt(order_id: int) -> None: ...

        @job(name="shop.send_newsletter", queue="mails", rate="1/m")
        def send_newsletter(to: str) -> None: ...

        yield write_receipt


def rows(heading: str) -> set[str]:
    """The names in the first columns of the tables below a heading."""
    _, _, part = TEXT.partition(f"## {heading}\n")
    part = part.partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", part, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def output(command: str, *arguments: str) -> str:
    text = StringIO()
    call_command(command, *arguments, stdout=text, stderr=text, no_color=True)
    return text.getvalue()


def test_each_status_of_a_job_has_a_row() -> None:
    assert {str(status) for status in JobStatus} <= rows("Why is my job not running?")


def test_each_reason_of_a_dead_letter_has_a_row() -> None:
    assert set(DeadLetterReason.values) <= rows("A dead letter, and what it says")


async def enqueue_in_a_coroutine(shop: Any) -> None:
    shop.enqueue(order_id=1)


async def await_in_a_coroutine(shop: Any) -> None:
    await shop.aenqueue(order_id=1)


def run_in_a_transaction(shop: Any) -> None:
    with transaction.atomic():
        asyncio.run(await_in_a_coroutine(shop))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a missing argument": lambda shop: shop.enqueue(order=1),
    "an object as an argument": lambda shop: shop.enqueue(order_id=named("Order")()),
    "a queue that is misspelt": lambda shop: shop.using(queue="mial").enqueue(order_id=1),
    "a coroutine": lambda shop: asyncio.run(enqueue_in_a_coroutine(shop)),
    "asyncio.run() in a transaction": run_in_a_transaction,
}


def named(name: str) -> type:
    return type(name, (), {})


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_quoted(shop: Any, what: str) -> None:
    with pytest.raises(Exception) as raised:
        REFUSED[what](shop)
    assert f"{type(raised.value).__name__}: {raised.value}" in TEXT


def test_waiting_in_a_transaction_is_quoted(shop: Any) -> None:
    with pytest.raises(Exception) as raised, transaction.atomic():
        shop.enqueue(order_id=1).wait(timeout=1)
    kind, beginning, end = re.search(
        r"`(UncommittedJobError): (Waiting for job) … (inside [^`]+)`", TEXT
    ).groups()
    assert type(raised.value).__name__ == kind
    assert str(raised.value).startswith(beginning)
    assert end in str(raised.value)


def test_a_worker_that_is_told_a_misspelt_queue_is_quoted() -> None:
    with pytest.raises(CommandError) as raised:
        output("kjo_consume", "mial")
    assert f"CommandError: {raised.value}" in TEXT


def test_a_misspelt_setting_is_quoted(settings: Any) -> None:
    settings.KJO = {"CONCURENCY": 4}
    (message,) = [found for found in check_settings() if found.id == "kjo.E002"]
    assert f"({message.id}) {message.msg}" in TEXT
    assert f"HINT: {message.hint}" in TEXT


def test_a_file_of_sqlite_with_the_default_options_is_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": "never-opened.sqlite3", "OPTIONS": {}}
    seen = SimpleNamespace(DATABASES={"default": file}, USE_TZ=True)
    monkeypatch.setattr("kjo_django.checks.django_settings", seen)
    (message,) = [found for found in check_settings() if found.id == "kjo.W020"]
    assert f"({message.id}) {message.msg}" in TEXT
    assert f"HINT: {message.hint}" in TEXT


def test_what_commands_say_of_jobs_that_wait_is_quoted(shop: Any) -> None:
    # Given nobody to run jobs
    assert output("kjo_status").rstrip().rpartition("\n")[2] in TEXT
    # Given a worker for another queue
    WorkerFactory(queues=["mails", "reports"])
    is_well, detail, _ = health._workers(health.Thresholds(), 1)
    assert not is_well
    assert detail.startswith("1 alive; none for default")
    assert "FAILED workers 1 alive; none for default" in TEXT
    # Then the tables have the columns of the page
    first = re.sub(r" {2,}", "  ", output("kjo_status").splitlines()[0]).strip()
    assert first in re.sub(r" {2,}", "  ", TEXT)
    limits = [re.sub(r" {2,}", "  ", line) for line in output("kjo_limits", "list").splitlines()]
    assert limits[0].strip() in re.sub(r" {2,}", "  ", TEXT)
    assert limits[1].startswith("job:shop.send_newsletter  1/m  1  -  -  0  rate 1/m, burst 1")


def test_a_handler_that_no_worker_knows_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    since = health.CLOCK.now()
    known = {"shop.new_in_this_release": (1, since)}
    monkeypatch.setattr(health.status, "unknown_handlers", lambda: known)
    _, detail, fix = health._handlers(health.Thresholds(), 1)
    assert fix in TEXT
    assert detail.partition(", the first for")[0] in TEXT
