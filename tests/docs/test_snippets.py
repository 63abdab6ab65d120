"""The snippets of pages run, with a worker: what a page tells people to write does what it says.

Python blocks run in their order, in one namespace. A block that begins with `# shop/jobs.py` is
that module; one that begins with `# settings.py` gives ``KJO``. In tables whose last column is
called *Here*, each code of that column runs too: as Python, as the decorator of a handler, as
settings, or as a command whose arguments are parsed.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class
from django.db import connections
from django.utils import timezone

from kjo_django import registry
from kjo_django.checks import check_settings
from kjo_django.exceptions import KjoError
from kjo_django.models import Job
from kjo_django.worker import Worker
from tests import reference
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # compares the pages with the code

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOW_TO = [
    "unique-jobs",
    "move-from-celery",
    "move-from-rq",
    "move-from-django-q2",
    "move-from-huey",
]
REFERENCE = ["job", "using", "job-classes", "workflow-classes"]
PAGES = [f"how-to/{name}" for name in HOW_TO] + [f"reference/{name}" for name in REFERENCE]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\|[^\n]*\| Here \|\n\|[-| ]+\|\n((?:\|[^\n]*\|\n)+)", re.MULTILINE)
MODULE = re.compile(r"# (shop)/(\w+)\.py\n")


def pieces(text: str) -> list[tuple[str, str]]:
    """Return the snippets of a page in their order, each with its kind."""
    blocks = [(block.start(), textwrap.dedent(block[2])) for block in BLOCK.finditer(text)]
    found = [(start, kind_of(code), code) for start, code in blocks]
    for table in TABLE.finditer(text):
        for row in table[1].splitlines():
            cell = re.split(r"(?<!\\)\|", row)[-2].replace("\\|", "|")
            codes = re.findall(r"`([^`]+)`", cell)
            found += [(table.start(), kind_of(code), code) for code in codes]
    return [piece[1:] for piece in sorted(found, key=lambda piece: piece[0])]


def kind_of(code: str) -> str:
    if code.startswith("manage.py "):
        return "command"
    if MODULE.match(code):
        return "module"
    if code.startswith(("KJO = ", "# settings.py\n")):
        return "settings"
    if code.startswith("raise "):
        return "raise"
    return "decorator" if code.startswith("@") and "\n" not in code else "python"


class StandIn:
    """Stands for another queue's decorator of tasks, with or without arguments: notes the functions
    that messages in its broker would call."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]):
            self.functions.append(arguments[0])
            return arguments[0]
        return self


PEERS = {
    "celery": "shared_task",
    "django_rq": "job",
    "huey.contrib.djhuey": "db_task",
}
"""The modules and decorators that pages import of the queue that is left."""


class Page:
    """What the snippets of one page make."""

    def __init__(self, text: str, settings: Any) -> None:
        self._pieces, self._settings = pieces(text), settings
        self._kjo: dict[str, Any] = {}
        self._names: dict[str, Any] = {"__name__": "page"}
        self.stand_in = StandIn()
        for path, name in PEERS.items():
            module_of(path)
            setattr(sys.modules[path], name, self.stand_in)

    def run(self) -> None:
        """Run all snippets, and the jobs that they enqueue and that are due."""
        self._do("settings")
        self._do("module")
        # Their database is that of the tests, which are to pass with Django's options, too.
        assert [found for found in check_settings() if found.id != "kjo.W020"] == []
        with working():
            self._do("python", "decorator", "command", "raise")
            for function in self.stand_in.functions:
                function(7)
            wait_until_idle()
        assert not list(Job.objects.filter(state="failed").values_list("handler", "error"))

    def _do(self, *kinds: str) -> None:
        for kind, code in self._pieces:
            if kind in kinds:
                try:
                    getattr(self, f"_do_{kind}")(code)
                except BaseException as error:
                    error.add_note(f"Raised by this snippet:\n{code}")
                    raise

    def _do_settings(self, code: str) -> None:
        given: dict[str, Any] = {}
        exec(code, given)
        self._kjo |= given["KJO"]
        self._settings.KJO = dict(self._kjo)

    def _do_module(self, code: str) -> None:
        path = MODULE.match(code)
        assert path is not None
        exec(code, vars(module_of(f"{path[1]}.{path[2]}")))

    def _do_python(self, code: str) -> None:
        exec(code, self._names)

    def _do_raise(self, code: str) -> None:
        with pytest.raises(KjoError):
            exec(code, self._names)

    def _do_decorator(self, code: str) -> None:
        exec(f"{code}\ndef decorated(order_id: int = 0): ...", self._names)

    def _do_command(self, code: str) -> None:
        _, name, *arguments = shlex.split(code)
        command = load_command_class(get_commands()[name], name)
        command.create_parser("manage.py", name).parse_args(arguments)


def module_of(path: str) -> types.ModuleType:
    """Return a module that no file holds, within its packages."""
    parent = None
    for name in itertools.accumulate(path.split("."), "{}.{}".format):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    return module


@contextmanager
def working() -> Iterator[None]:
    """Let a worker run jobs meanwhile."""
    worker = Worker(None, owns_process=False)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(PATIENCE)
        connections.close_all()


def wait_until_idle() -> None:
    def due() -> Any:
        return Job.objects.open().filter(available_at__lte=timezone.now())

    wait_until(
        lambda: not due().exists(),
        "nothing is left that is due",
        lambda: list(due().values_list("handler", "state", "error")),
    )


@pytest.fixture
def clean(sqlite_file: Path) -> Iterator[None]:
    """Forget what the page declares."""
    before = set(sys.modules)
    with registry.isolated():
        yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"shop", *(path.partition(".")[0] for path in PEERS)}:
            del sys.modules[name]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", PAGES)
def test_the_snippets_of_a_page_run(name: str, settings: Any) -> None:
    text = (DOCS / f"{name}.md").read_text()
    Page(reference.BLOCK.sub("", text), settings).run()  # signatures are no snippets
