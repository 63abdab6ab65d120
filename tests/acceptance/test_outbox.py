"""The example's outbox: its README, and a mail server that is busy at times (issue 3: 7)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.acceptance.smtp import MailServer
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "example_project" / "outbox" / "README.md"
SERVERS = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")
PRODUCER = "example_project.outbox.producers.EmailProducer"

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The example with a database and a folder of its own."""
    return {
        **{name: value for name, value in os.environ.items() if name not in SERVERS},
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "KJO_EXAMPLE_DB": str(tmp_path / "db.sqlite3"),
        "KJO_EXAMPLE_MAIL": str(tmp_path / "mail"),
        "PYTHONUNBUFFERED": "1",
    }


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # the log, as one sees it
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows(environment: dict[str, str], sql: str) -> list:
    with sqlite3.connect(environment["KJO_EXAMPLE_DB"], timeout=20) as connection:
        return connection.execute(sql).fetchall()


def documented() -> list[tuple[str, str]]:
    """The README's commands with the output it prints under each."""
    return re.findall(r"```sh\n(.*?)\n```\n\n```text\n(.*?)\n```", README.read_text(), re.DOTALL)


def test_the_readmes_three_commands_print_what_it_says(environment, tmp_path) -> None:
    commands = documented()
    assert len(commands) == 3
    for command, expected in commands:
        program, *arguments = shlex.split(command)
        assert (program, arguments[0]) == ("python", "manage.py")
        pattern = ".*?".join(re.escape(part) for part in expected.split("…"))
        output = run(environment, *arguments[1:]).rstrip("\n")
        assert re.fullmatch(pattern, output, re.DOTALL), output
    assert run(environment, "outbox", "show") == "Outbox: 0 PENDING, 10 COMPLETED, 0 FAILED\n"
    assert len(list((tmp_path / "mail" / "outbox").glob("*.eml"))) == 10


@pytest.mark.long
def test_sending_twice_skips(environment) -> None:
    """KJO-15, KJO-16: as its README says."""
    produce = ("kjo_produce", PRODUCER, "--criteria", "state=PENDING")
    run(environment, "outbox", "write", "10")
    assert "10 sent, 0 skipped" in run(environment, *produce)
    rows(environment, "UPDATE outbox_email SET subject = 'changed' WHERE id = 4")
    assert "1 sent, 9 skipped" in run(environment, *produce)
    assert "0 sent, 10 skipped" in run(environment, *produce)


def test_a_mail_server_that_is_busy_at_times(environment) -> None:
    """KJO-72 … 76: each email goes out once, whatever the server says meanwhile."""
    asked: Counter[str] = Counter()

    def judge(recipient: str) -> str:
        asked[recipient] += 1
        if recipient == "customer-7@example.com":
            return "550 no such user"
        if recipient in ("customer-3@example.com", "customer-11@example.com"):
            return "250 OK" if asked[recipient] > 1 else "451 4.7.1 too many messages"
        return "250 OK"

    with MailServer(judge) as server:
        environment["OUTBOX_SMTP"] = server.address
        run(environment, "outbox", "write", "20")
        workers = [
            subprocess.Popen([sys.executable, "manage.py", *arguments], cwd=ROOT, env=environment)
            for arguments in (
                ("kjo_produce", PRODUCER, "--criteria", "state=1", "--interval", "1"),
                ("kjo_consume", "outbox", "--status-interval", "0"),
            )
        ]
        try:
            left = "SELECT count(*) FROM outbox_email WHERE state = 1"
            wait_until(lambda: rows(environment, left) == [(0,)], "No email is left")
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            codes = [worker.wait() for worker in workers]
    assert codes == [0, 0]
    sent = Counter(message["To"] for message in server.accepted)
    expected = {f"customer-{n}@example.com" for n in range(1, 21)} - {"customer-7@example.com"}
    assert sent == Counter(expected)
    assert Counter(server.refused) == {
        "customer-3@example.com": 1,
        "customer-7@example.com": 1,
        "customer-11@example.com": 1,
    }
    assert rows(environment, "SELECT id FROM outbox_email WHERE state = 3") == [(7,)]
    assert rows(environment, "SELECT reason, error FROM kjo_dead_letter") == [
        ("fatal", "550 no such user")
    ]
    assert {message["Message-ID"] for message in server.accepted} == {
        row[0] for row in rows(environment, "SELECT message_id FROM outbox_email WHERE state = 2")
    }
