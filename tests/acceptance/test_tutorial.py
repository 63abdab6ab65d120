"""The tutorial, as somebody follows it: its files are written, and its commands run in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"(.*?)^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENVIRONMENT = re.compile(r"^(python3 -m venv|\. \.venv|pip install)")
"""Commands that make the environment the tests run in already."""
SLOW = 120
"""Seconds until what a page promises for the next moment must be there."""

MAIL = re.compile(r"`(EMAIL_BACKEND = [^`]+)`")
"""Where mails go, for projects that were not begun with Django 6.1."""
DIED = """python manage.py shell -c '
from kjo_django.models import DeadLetter
assert DeadLetter.objects.exists()'"""


class Reader:
    """Somebody with an empty folder and a terminal."""

    def __init__(
        self, folder: Path, python: str = sys.executable, path: Path | None = ROOT
    ) -> None:
        self.folder = folder
        self.python = python
        self.path = path
        self.shown = ""
        self.terminal = folder / "second-terminal"
        """What the worker prints."""
        self._worker: subprocess.Popen[bytes] | None = None
        self._worker_command = ""
        """What a page has told to type in the second terminal."""

    def write(self, path: str, code: str) -> None:
        """Write a file; of the settings, the part that is shown."""
        file = self.folder / path
        is_part = file.name == "settings.py"
        file.write_text(f"{file.read_text()}\n{code}" if is_part else code)
        if self._worker_command:  # "and the worker started again"
            self.end()
            self.consume()

    def run(self, commands: str) -> None:
        """Run a block of commands, again until it succeeds: a worker needs its moment."""
        lines = [line for line in commands.splitlines() if not ENVIRONMENT.match(line)]
        code = "\n".join(lines).replace("createsuperuser", "createsuperuser --noinput")
        if "kjo_consume" in code:
            self._worker_command = code
            self.consume()
            return
        if not code.strip() or "runserver" in code:
            return  # the browser tests open the admin
        told = ""

        def succeeds() -> bool:
            nonlocal told
            self._assert_worker_runs()
            done = subprocess.run(
                ["bash", "-ec", code],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
            )
            self.shown += done.stdout
            told = done.stdout + done.stderr
            return done.returncode == 0

        wait_until(succeeds, code, lambda: told)
        if "kjo_status" in code:  # "and then ends as a dead letter"
            self.run(DIED)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if "DJANGO" not in name}
        who = {"USERNAME": "ada", "PASSWORD": "ada", "EMAIL": "ada@example.com"}
        return {
            **inherited,
            **{f"DJANGO_SUPERUSER_{name}": value for name, value in who.items()},
            "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.path or ""),
        }

    @property
    def has_mailers(self) -> bool:
        """Whether the project was begun by a Django that has ``MAILERS``."""
        return "MAILERS" in (self.folder / "mysite" / "settings.py").read_text()

    def consume(self) -> None:
        """Start the worker of the second terminal, by the command of the page."""
        command = ["bash", "-ec", f"exec {self._worker_command}"]
        with self.terminal.open("ab") as terminal:
            self._worker = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=terminal, stderr=terminal
            )

    def _assert_worker_runs(self) -> None:
        """Fail where the worker has ended by itself, with what it has printed."""
        code = None if self._worker is None else self._worker.poll()
        assert code is None, (
            f"{self._worker_command!r} ended with {code}: {self.terminal.read_text()[-3000:]}"
        )

    def end(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            self._worker.wait(PATIENCE)
            self._worker = None


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.end()


def follow_the_tutorial(reader: Reader) -> None:
    """Type the page, and look for what it promises."""
    text = TUTORIAL.read_text().partition("## Move to Kafka")[0]
    for before, language, code in BLOCK.findall(text):
        if (mail := MAIL.search(before)) and not reader.has_mailers:
            reader.write("mysite/settings.py", f"{mail[1]}\n")
        if language == "sh":
            reader.run(code)
        else:
            reader.write(re.findall(r"`([\w/]+\.py)`", before)[-1], code)
    assert "ada@example.com paid 12.50" in reader.shown
    log = reader.terminal.read_text()
    for line in (
        *("INFO Started shop.write_receipt", "INFO Completed shop.write_receipt"),
        *("WARNING Failed shop.write_receipt", "ERROR Dead-lettered shop.write_receipt"),
    ):
        assert re.search(rf"^\d{{4}}-\d\d-\d\d \S+[+-]\d\d:\d\d {line} \S+ \(", log, re.M), log
    assert "5872.8150 euros" in reader.shown  # (12.50 + 7.00 + 500 x 10.00) x 1.17
    assert re.search(r"shop\.convert_order +\S+ +502 +502 completed", reader.shown)
    reader.run(
        "python manage.py shell -c '\n"
        "from shop.models import Receipt\n"
        'assert Receipt.objects.filter(text="bob@example.com paid 7.00").exists()\''
    )
    # And the next order's mail is printed in the worker's terminal
    reader.run(
        "python manage.py shell -c '\n"
        "from shop.models import Order\n"
        'Order.objects.create(email="dora@example.com", total="3.00")\''
    )
    wait_until(
        lambda: "To: dora@example.com" in reader.terminal.read_text(),
        "the mail is printed",
        lambda: reader.terminal.read_text()[-3000:],
    )


@pytest.mark.promise("no-servers")
def test_the_tutorial_works_as_it_is_written(reader: Reader) -> None:
    follow_the_tutorial(reader)
