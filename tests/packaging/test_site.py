"""The pages become a site: without a warning, every link leads somewhere, and nothing is loaded
from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What one page of the site links, loads and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link":
            self.loaded.add(given.get("href", ""))
        self.loaded.add(given.get("src", ""))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_is_there(site: Path) -> None:
    written = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert not [str(path) for path in written if not (site / path.with_suffix(".html")).exists()]


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if ":" in target:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            is_known = file.exists() and (file not in pages or not anchor)
            if not is_known and unquote(anchor) not in getattr(pages.get(file), "ids", ()):
                dead.append(f"{path.name}: {link}")
    assert not dead


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    elsewhere = {link for page in pages.values() for link in page.loaded if "//" in link}
    assert not elsewhere


def test_every_picture_style_and_script_is_there(pages: dict[Path, Page]) -> None:
    loaded = {
        (path.parent / unquote(link.partition("?")[0])).resolve()
        for path, page in pages.items()
        for link in page.loaded
        if link and not link.startswith("data:")
    }
    assert any(path.name == "overview-light.png" for path in loaded)
    assert not [str(path) for path in loaded if not path.exists() and path.suffix]


def test_the_navigation_of_every_page_has_all_but_the_decisions(pages: dict[Path, Page]) -> None:
    written = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    decisions = {path.stem for path in (ROOT / "docs" / "decisions").glob("0*.md")}
    for path, page in pages.items():
        if path.stem == "tutorial":
            linked = {Path(link.partition("#")[0]).stem for link in page.links}
            assert written - decisions - {"tutorial"} <= linked


def test_the_search_finds_words_of_the_pages(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert '"debounc"' in index or "debounc:" in index
    assert '"how-to/unique-jobs"' in index
