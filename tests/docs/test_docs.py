"""The documentation holds: its links lead somewhere, its code compiles, its reference is the code's
own."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from kjo_django import signals
from tests import reference

pytestmark = pytest.mark.medium  # compares the pages with the code

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / ".github").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The anchors a page's headings get."""
    text = FENCE.sub("", page.read_text())
    names = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {name.strip().replace(" ", "-") for name in names}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))
WORDS_READ_IN_FIVE_MINUTES = 5 * 270


def test_there_is_a_design_note_for_each_room_and_no_more() -> None:
    assert len(NOTES) <= 12


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_a_design_note_is_read_in_five_minutes(note: Path) -> None:
    """Tables are looked up, not read."""
    prose = [line for line in note.read_text().splitlines() if not line.startswith("|")]
    text = re.sub(r"\]\([^)]*\)", "]", " ".join(prose))
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= WORDS_READ_IN_FIVE_MINUTES


@each_page
def test_python_compiles(page: Path) -> None:
    for _indent, language, code in FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(textwrap.dedent(code), filename=str(page))


@each_page
def test_code_says_what_language_it_is(page: Path) -> None:
    for _indent, language, code in FENCE.findall(page.read_text()):
        assert language, f"a block of code without a language: {code[:60]!r}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = (link.partition("#")[0] for link in LINK.findall(page.read_text()))
            ahead += [(page.parent / link).resolve() for link in links if link and ":" not in link]
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_the_reference_is_the_codes_own(page: Path) -> None:
    text = page.read_text()
    assert reference.rewritten(text) == text, "out of date: run `python -m tests.reference`"


def test_every_block_of_the_reference_has_its_place() -> None:
    used = [
        name
        for page in reference.pages()
        for _, name, _ in reference.BLOCK.findall(page.read_text())
    ]
    assert sorted(used) == sorted(reference.BLOCKS)


def test_every_signal_is_documented() -> None:
    declared = {
        name for name in vars(signals) if isinstance(getattr(signals, name), signals.Signal)
    }
    assert declared == {name for name, _ in reference.tabled(signals.__doc__)}
    text = (reference.REFERENCE / "signals.md").read_text()
    missing = [name for name in declared if text.count(f"`{name}`") < 2]
    assert not missing, "say when each is sent"


def test_every_path_of_the_architecture_exists() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    paths = re.findall(r"`((?:[\w.-]+/)+(?:\w+\.py)?|\w+\.py)`", FENCE.sub("", text))
    places = [ROOT, ROOT / "kjo_django", *(ROOT / "kjo_django").iterdir()]
    places += [ROOT / "kjo_django/engine/handler", ROOT / "kjo_django/transports/kafka"]
    assert len(paths) > 50
    assert not [path for path in paths if not any((place / path).exists() for place in places)]
