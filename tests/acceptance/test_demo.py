"""`manage.py demo` as its users start it: a process of its own, judged by what it leaves behind."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.services.fixtures import require

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "example_project" / "shop" / "data" / "orders.csv"
SERVERS = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")

# What SOURCE.md counts in the shipped file, as the reasons that tell of it.
NO_CUSTOMER, ZERO_PRICE = "no customer number", "unit price is zero"
NO_DESCRIPTION, NEGATIVE = "no description", "negative quantity"
CANCELLATION = "a cancellation needs a credit note, not an invoice"
DIRT = {
    NO_CUSTOMER: 71,
    f"{NO_CUSTOMER}, {ZERO_PRICE}": 64,
    CANCELLATION: 26,
    f"{NO_CUSTOMER}, {NO_DESCRIPTION}, {NEGATIVE}, {ZERO_PRICE}": 7,
    f"{NO_CUSTOMER}, {NO_DESCRIPTION}, {ZERO_PRICE}": 3,
    f"{NO_CUSTOMER}, {NEGATIVE}, {ZERO_PRICE}": 2,
}
# Three jobs for each clean row and each cancellation of a known customer, one for the others.
JOBS = {"enqueued": 1650, "completed": 1477, "dead_letters": 173, "retried": 25}
WORKFLOW = {"name": "orders of a day", "state": "completed", "steps": 503, "orders": 500}
SLOW = 400
"""Seconds a run may take on a machine at a third of the usual speed; 25 are usual."""
REFUSAL = "(451, '4.7.1 Too many messages, try again later')"


@dataclass
class Shop:
    """A place of its own for the example project's database and mails."""

    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "db.sqlite3"

    servers: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, *arguments: str, before: Sequence[str] = (), **options: Any
    ) -> subprocess.CompletedProcess[str]:
        command = [*before, sys.executable, "manage.py", "demo", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment(), capture_output=True, text=True, **options
        )

    def environment(self) -> Mapping[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in SERVERS}
        return {
            **inherited,
            **self.servers,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "KJO_EXAMPLE_DB": str(self.database),
            "KJO_EXAMPLE_MAIL": str(self.folder / "mail"),
        }

    def result(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """Run with --json and return the one object printed."""
        done = self.run("--json", *arguments, timeout=options.pop("timeout", SLOW), **options)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def shell(self, code: str) -> None:
        command = [sys.executable, "manage.py", "shell", "-c", code]
        subprocess.run(command, cwd=ROOT, env=self.environment(), check=True, timeout=SLOW)

    def mails(self, batch: str) -> list[str]:
        """The order each mail of a batch was about."""
        return [file.name.rpartition("-")[0] for file in (self.folder / "mail" / batch).iterdir()]

    def query(self, sql: str, *parameters: Any) -> list[Any]:
        connection = sqlite3.connect(self.database)
        try:
            return connection.execute(sql, parameters).fetchall()
        finally:
            connection.close()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def assert_shipped_file_is_settled(result: Mapping[str, Any]) -> None:
    assert {name: result[name] for name in ("orders", "enqueued", "completed", "dead_letters")} == {
        "orders": 648,
        "enqueued": 648,
        "completed": 475,
        "dead_letters": 173,
    }
    assert result["reasons"] == DIRT
    assert result["seconds"] > 0


@pytest.mark.promise("no-servers")
@pytest.mark.medium
def test_the_shipped_orders_are_settled_and_every_effect_happened_once(shop: Shop) -> None:
    result = shop.result()

    # Then the figures are those of the file's dirt
    assert_shipped_file_is_settled(result)
    assert result["engine"] == {
        "database": "sqlite",
        "transport": "database",
        "coordination": "database",
    }
    # And nothing but the simulated refusals was retried: every 20th of 501 mails
    assert (result["retried"], result["retries"]) == (25, {REFUSAL: 25})
    assert result["jobs"] == JOBS

    # And the day's workflow has ended: 500 orders converted one by one, and added up
    assert result["workflow"].items() >= WORKFLOW.items()
    assert shop.query("SELECT state, step_count FROM kjo_workflow") == [("completed", 503)]
    assert shop.query(
        "SELECT handler, count(*) FROM kjo_job WHERE queue = 'reports' AND state = 'completed' "
        "AND attempts = 1 GROUP BY handler ORDER BY handler"
    ) == [
        ("shop.convert_order", 500),
        ("shop.fetch_orders", 1),
        ("shop.report_day", 1),
        ("shop.split_orders", 1),
    ]

    # And each confirmation that completed wrote one mail, no other did
    confirmed = shop.query(
        "SELECT unique_id FROM kjo_job WHERE queue='emails' AND state='completed'"
    )
    assert sorted(shop.mails(result["batch"])) == sorted(reference for (reference,) in confirmed)
    assert result["mails"] == len(confirmed) == 501

    # And so did stock and invoices, to the penny
    assert shop.query("SELECT count(*) FROM shop_stockmovement") == [(501,)]
    assert shop.query("SELECT count(*) FROM shop_invoiceline") == [(475,)]
    assert shop.query(
        "SELECT count(*) FROM shop_invoice i WHERE round(total * 100) <> "
        "(SELECT round(sum(amount) * 100) FROM shop_invoiceline WHERE invoice_id = i.id)"
    ) == [(0,)]

    # And an order is completed exactly if all three are there: none is lost, none half done
    assert shop.query(
        "SELECT count(*) FROM shop_order o "
        "JOIN shop_stockmovement s ON s.order_id = o.id "
        "JOIN shop_invoiceline l ON l.order_id = o.id "
        "WHERE NOT EXISTS (SELECT 1 FROM kjo_dead_letter d JOIN kjo_job j ON j.id = d.job_id "
        "                  WHERE j.unique_id = o.reference)"
    ) == [(475,)]
    assert shop.query("SELECT count(*), count(DISTINCT job_id) FROM kjo_dead_letter") == [
        (173, 173)
    ]


def test_a_second_run_on_the_same_database_counts_only_itself(shop: Shop) -> None:
    first = shop.result("--orders", "100")

    second = shop.result("--orders", "60")

    assert (first["orders"], second["orders"]) == (100, 60)
    assert second["completed"] + second["dead_letters"] == second["enqueued"] == 60
    assert second["mails"] == len(shop.mails(second["batch"])) == 60
    assert shop.query("SELECT count(*) FROM shop_order") == [(160,)]


def test_people_are_told_what_happened_and_where_to_look(shop: Shop) -> None:
    done = shop.run("--orders", "240", timeout=SLOW)

    assert done.returncode == 0, done.stderr
    assert "Nothing is lost: 240 rows in = 208 completed + 32 dead-lettered." in done.stdout
    assert "22 no customer number, unit price is zero (row 218, 219, 220, …)" in done.stdout
    assert "simulated: the shop's mail gateway refuses every 20th mail once" in done.stdout
    assert "python manage.py runserver" in done.stdout
    assert 'Workflow "orders of a day": completed in ' in done.stdout
    assert "221 steps (fetch, split, convert 218 orders, report)" in done.stdout
    # And the progress went to stderr, in lines, since nobody watches a terminal there
    assert "Saving orders 240 of 240 (100%)" in done.stderr
    assert "\r" not in done.stderr
    assert "Dead-lettered" not in done.stderr and "Failed" not in done.stderr


def test_cells_no_job_can_use_are_saved_as_they_are_and_end_as_readable_dead_letters(
    shop: Shop, tmp_path: Path
) -> None:
    # Given a row for each way a cell can be of no use, and two that are fine
    good = {
        "InvoiceNo": "539761",
        "StockCode": "84030e",
        "Description": " SWISS  ROLL ",
        "Quantity": "8",
        "InvoiceDate": "2010-12-22 10:29:00",
        "UnitPrice": "1.95",
        "CustomerID": "17593.0",
        "Country": "",
    }
    useless = {
        "no invoice number": {"InvoiceNo": " "},
        "no stock code": {"StockCode": ""},
        "unreadable stock code": {"StockCode": "ß" * 250},
        "unreadable customer number": {"CustomerID": "a@b\nBcc: c"},
        "quantity is not a whole number": {"Quantity": "1.5"},
        "quantity is zero": {"Quantity": "0"},
        "negative quantity": {"Quantity": "-2"},
        "unit price is not an amount of money": {"UnitPrice": "1e999999999"},
        "negative unit price": {"UnitPrice": "-0.01"},
        "unreadable invoice date": {"InvoiceDate": "22/12/2010"},
        "invoice date out of range": {"InvoiceDate": "9999-12-31T23:59:59-05:00"},
    }
    rows = [good, *({**good, **cells} for cells in useless.values()), {**good, "Quantity": "8.0"}]
    lines = [list(good), *([*row.values()] for row in rows)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in line) for line in lines))

    result = shop.result("--input", str(path))

    assert (result["orders"], result["completed"]) == (len(rows), 2)
    assert result["reasons"] == dict.fromkeys(useless, 1)
    # And the text stands in the database as it stood in the file
    assert shop.query("SELECT quantity, description FROM shop_order WHERE row_number = 6") == [
        ("1.5", " SWISS  ROLL ")
    ]


CORRECT_AND_REPLAY = """
from example_project.shop.models import Order
from kjo_django.operations import dead_letters

Order.objects.filter(customer_id="").update(customer_id="17593.0")
dead_letters.replay(dead_letters.DeadLetterFilter(queue="emails"))
"""
WORK_ON = """
from kjo_django.models import Job
from kjo_django.worker import Worker

Worker().run(until=lambda: not Job.objects.open().exists())
"""


@pytest.mark.promise("replay")
def test_a_corrected_order_is_worked_off_when_its_dead_letter_is_replayed(shop: Shop) -> None:
    # Given 70 orders, three of them without a customer
    result = shop.result("--orders", "70")
    assert result["reasons"] == {NO_CUSTOMER: 3}

    # When the cells are filled in and the dead letters replayed
    shop.shell(CORRECT_AND_REPLAY + WORK_ON)

    # Then all orders were confirmed, moved stock and were invoiced, each once
    assert len(shop.mails(result["batch"])) == len(set(shop.mails(result["batch"]))) == 70
    assert shop.query("SELECT count(*) FROM shop_stockmovement") == [(70,)]
    assert shop.query("SELECT count(*) FROM shop_invoiceline") == [(70,)]
    assert shop.query("SELECT count(*) FROM kjo_job WHERE state <> 'completed'") == [(0,)]
    assert shop.query("SELECT state, count(*) FROM kjo_dead_letter GROUP BY 1") == [("replayed", 3)]


UNUSABLE = {
    "a column is missing": (b"InvoiceNo,StockCode\n1,2\n", ", line 1: no column Description"),
    "empty": (b"", ": the file is empty"),
    "a header alone": (SHIPPED.read_bytes().partition(b"\n")[0], ": a header and no rows"),
    "Latin-1 at the end": (SHIPPED.read_bytes() + b"caf\xe9", ", line 650: byte 57656 (0xe9)"),
    "binary": (bytes(range(256)), ", line 2: byte 128 (0x80) is not utf-8"),
}


@pytest.mark.medium("binary")
@pytest.mark.parametrize(("content", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_file_of_no_use_is_refused_and_leaves_nothing(
    shop: Shop, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)

    done = shop.run("--json", "--input", str(path), timeout=SLOW)

    assert done.returncode == 2
    assert f"{path}{message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not shop.database.exists()


@pytest.mark.medium("a folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "no-such-file.csv"], "no-such-file.csv: cannot be read: No such file"),
        (["--input", str(SHIPPED.parent)], "not a regular file"),
        (["--orders", "0"], "must be a whole number, at least 1, not '0'"),
        (["--orders", "649"], "it has 648 rows, --orders 649 asks for more"),
        (["--encoding", "utf-ate"], "unknown encoding 'utf-ate'"),
    ],
    ids=["a missing file", "a folder", "no orders", "more orders than rows", "an encoding"],
)
def test_an_option_of_no_use_is_refused_and_leaves_nothing(
    shop: Shop, arguments: list[str], message: str
) -> None:
    done = shop.run("--json", *arguments, timeout=SLOW)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not shop.database.exists()


@pytest.mark.parametrize(
    ("variable", "url", "message"),
    [
        ("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1", "Kafka does not answer"),
        ("REDIS_URL", "redis://127.0.0.1:1/0", "Redis at CACHES['default']"),
        ("DATABASE_URL", "postgresql://me@127.0.0.1:1/shop", "The database cannot be used"),
    ],
)
def test_a_server_that_does_not_answer_is_named_before_anything_is_saved(
    tmp_path: Path, variable: str, url: str, message: str
) -> None:
    shop = Shop(tmp_path, {variable: url})

    done = shop.run("--json", timeout=SLOW)

    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if shop.database.exists():
        assert shop.query("SELECT count(*) FROM shop_order") == [(0,)]


def interrupted_run(folder: Path) -> Shop:
    """Interrupt a run when its jobs begin. On a busy machine one may end before it is told."""
    for number in range(5):
        shop = Shop(folder / str(number))
        shop.folder.mkdir()
        command = [sys.executable, "manage.py", "demo"]
        run = subprocess.Popen(
            command, cwd=ROOT, env=shop.environment(), stderr=subprocess.PIPE, text=True
        )
        assert run.stderr is not None
        while "Saving orders 648" not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        _out, errors = run.communicate(timeout=SLOW)
        if run.returncode != 0:
            assert run.returncode in {1, 130}
            assert "CommandError: Not all orders are settled." in errors
            return shop
    raise AssertionError("Each run ended before it was interrupted.")


def test_what_an_interrupted_run_left_is_not_counted_and_not_lost(tmp_path: Path) -> None:
    # Given a run that is interrupted when its jobs begin
    shop = interrupted_run(tmp_path)

    # When the demo runs again
    second = shop.result("--orders", "50")

    # Then only its own orders are counted, and those of the first are settled sooner or later
    assert (second["orders"], second["completed"]) == (50, 50)
    shop.shell(WORK_ON)
    assert shop.query(
        "SELECT state, count(*) FROM kjo_job WHERE queue = 'emails' GROUP BY 1 ORDER BY 1"
    ) == [("completed", 501 + 50), ("failed", 147)]
    assert shop.query("SELECT count(*) FROM shop_invoiceline") == [(475 + 50,)]


@pytest.mark.promise("servers-by-settings")
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_the_same_demo_runs_on_kafka_redis_and_postgresql(shop: Shop) -> None:
    require(kafka=True, redis=True, postgres=True)
    services = [sys.executable, "-m", "tests.services", "run", "--"]

    result = shop.result(before=services, timeout=540)

    assert_shipped_file_is_settled(result)
    assert result["engine"] == {
        "database": "postgresql",
        "transport": "kafka",
        "coordination": "redis",
    }
    assert result["jobs"] == JOBS
    assert result["mails"] == len(set(shop.mails(result["batch"]))) == 501
    assert not shop.database.exists()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_file_of_100_000_rows_is_settled(shop: Shop, tmp_path: Path) -> None:
    # Given the shipped rows over and over, invoices numbered on so that keys spread as they do
    header, *rows = SHIPPED.read_text().splitlines()
    path = tmp_path / "large.csv"
    with path.open("w") as file:
        file.write(f"{header}\n")
        for number in range(100_000):
            repeat, place = divmod(number, len(rows))
            invoice, comma, rest = rows[place].partition(",")
            prefix, digits = invoice[:-6], int(invoice[-6:])
            file.write(f"{prefix}{digits + 400 * repeat}{comma}{rest}\n")

    result = shop.result("--input", str(path), timeout=3500)

    assert result["orders"] == result["enqueued"] == 100_000
    assert result["completed"] + result["dead_letters"] == 100_000
    assert result["mails"] == (result["jobs"]["enqueued"] - 100_000) / 2
