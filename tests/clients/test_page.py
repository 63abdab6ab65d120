"""What the page on other languages shows is what the tests run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "how-to" / "other-languages.md"
PROGRAM = re.compile(
    r"^\[`[\w./]+`\]\(\.\./(clients/[\w./]+)\):\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL
)
SHOWN = {Path(path): code for path, code in PROGRAM.findall(PAGE.read_text())}
LANGUAGES = {
    "node": "{}.js",
    "java": "{}.java",
    "go": "{}/main.go",
}


def stripped(text: str) -> str:
    """Return text without the indentation of its lines."""
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize("path", SHOWN, ids=str)
def test_a_program_is_shown_as_it_is(path: Path) -> None:
    assert stripped(SHOWN[path]) in stripped((DOCS / path).read_text())


def test_every_program_is_shown() -> None:
    programs = {
        Path("clients", language, name.format(program.title() if language == "java" else program))
        for language, name in LANGUAGES.items()
        for program in ("enqueue", "follow", "payments")
    }
    assert set(SHOWN) == programs


def test_every_block_of_these_languages_is_one_of_a_program() -> None:
    blocks = re.findall(r"^```(?:js|java|go)$", PAGE.read_text(), re.MULTILINE)
    assert len(blocks) == len(SHOWN)


def test_versions_are_exact() -> None:
    package = json.loads((DOCS / "clients" / "node" / "package.json").read_text())
    versions = [*package["dependencies"].values()]
    versions += re.findall(
        r"<version>(.+?)</version>", (DOCS / "clients" / "java" / "pom.xml").read_text()
    )
    assert len(versions) >= 4
    assert [each for each in versions if not re.fullmatch(r"\d+(\.\d+)*", each)] == []
