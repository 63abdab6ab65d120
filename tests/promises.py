"""The promises of ``docs/explanation/guarantees.md``, and the tests that show each of them.

Every sentence of that page's lists ends with its id, in a comment that readers do not see. A test
that fails where the sentence is not true names it: ``@pytest.mark.promise("job-is-run")``. Pages
and tests are read as text and not imported. ``python -m tests.reference`` writes
``docs/reference/promises.md``, and ``tests/test_promises.py`` checks that nothing is missing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "explanation" / "guarantees.md"

ITEM = re.compile(r"^(?:\d+\.|-) (.+(?:\n +.+)*)", re.MULTILINE)
NAMED = re.compile(r"(.*?)(?: <!-- ([a-z0-9-]+) -->|$) ?")
TITLE = re.compile(r"\*\*([^*]+)\*\* ?")
NEXT_SENTENCE = re.compile(r"[.!?]\)? (?=[A-Z`\[*])")
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")

WITHOUT_TEST = {
    "older-workers": "no test installs a release without workflows.",
    "what-servers-lose": "it is about other software, and about disks.",
    "hung-effects": "it is a limit of Python, which cannot end a call in C.",
    "blocking-coroutine": "it is how the event loop of asyncio works.",
}
"""Why there is no test, by the id of each sentence that has none."""


@dataclass(frozen=True)
class Promise:
    """One sentence, in the item of the list that has this title; without an id, one that has yet to
    be given one."""

    id: str | None
    title: str
    text: str


def promises(page: str) -> Iterator[Promise]:
    """Yield what a page promises, in its order."""
    for item in ITEM.findall(page):
        item = " ".join(item.split())
        title = TITLE.match(item)
        assert title is not None, f"begin with a title in bold: {item}"
        rest = item[title.end() :] if title[1].endswith(".") else item.replace("**", "")
        for text, id in NAMED.findall(rest):
            *unnamed, last = NEXT_SENTENCE.sub(r"\g<0>\n", text).split("\n")
            for sentence in unnamed:
                yield Promise(None, _plain(title[1]), sentence.strip())
            if last:
                yield Promise(id or None, _plain(title[1]), last)


def _plain(title: str) -> str:
    return LINK.sub(r"\1", title).rstrip(".,:")


def marked_in(module: str, code: str) -> Iterator[tuple[str, str]]:
    """Yield the ids that the markers of a module name, each with the name of its test.

    :param module: said when a marker stands where nobody would find it.
    """
    found = list(_marked(ast.parse(code), ()))
    assert sum(len(marks) for _, marks in found) == code.count("mark.promise("), (
        f"{module}: mark functions and classes only"
    )
    for name, marks in found:
        for mark in marks:
            for id in mark.args:
                yield ast.literal_eval(id), name


def _marked(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[str, list[ast.Call]]]:
    """Yield the names of marked tests and classes, each with its markers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = (*outer, child.name)
            marks = [each for each in child.decorator_list if isinstance(each, ast.Call)]
            yield (
                "::".join(name),
                [each for each in marks if ast.unparse(each.func) == "pytest.mark.promise"],
            )
            yield from _marked(child, name)


@cache
def by_promise() -> dict[str, dict[str, list[str]]]:
    """Return the tests of each promise by its id: their names, by the path of their module."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(TESTS.rglob("test_*.py")):
        code, module = path.read_text(), path.relative_to(TESTS).as_posix()
        if "mark.promise(" in code and path.name != "test_promises.py":
            for id, name in marked_in(module, code):
                found[id][module].append(name)
    return found


def lines() -> Iterator[str]:
    """Yield the lines of the page that lists promises with their tests."""
    stated = list(promises(PAGE.read_text()))
    without = [each for each in stated if each.id in WITHOUT_TEST]
    yield f"There are {len(stated)} sentences, {len(without)} of which have no test."
    title = None
    for each in stated:
        if each.title != title:
            title = each.title
            yield from ("", f"## {title}")
        yield from ("", f"### {each.id}", "", each.text, "")
        for module, names in by_promise().get(each.id or "", {}).items():
            listed = ", ".join(f"`{name}`" for name in names)
            yield f"- [{module}](../../tests/{module}): {listed}"
        if each in without:
            yield f"- No test: {WITHOUT_TEST[each.id or '']}"
    yield from ("", "## Without a test", "")
    for each in without:
        yield f"- [{each.id}](#{each.id}): {WITHOUT_TEST[each.id or '']}"
