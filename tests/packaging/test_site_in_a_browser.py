"""The site in a browser: its search answers what a new user asks, and its tables fit the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.browser import chromium
from tests.services.fixtures import require
from tests.waiting import wait_until

QUESTIONS = {
    "how do I run a job at night": "how-to/schedules",
    "why is my job not running": "how-to/troubleshooting",
    "how many workers do I need": "how-to/sizing",
    "database is locked": "how-to/troubleshooting",
    "retry a failed job": "how-to/dead-letters",
    "run a job after another": "how-to/workflows",
    "limit how many run at once": "how-to/limits",
    "test code that enqueues": "how-to/testing",
    "move from celery": "how-to/move-from-celery",
    "deploy without losing jobs": "how-to/deploy",
    "delete personal data": "how-to/personal-data",
    "see what runs now": "how-to/dashboard",
}
"""What a new user asks, and the page that answers it."""
LOOKED_AT = 3
"""How many of the results a person looks at."""
WIDTH = 1280

WIDER = """
const fits = (box) => box.scrollWidth <= box.clientWidth + 1;
const boxes = document.querySelectorAll(".table-wrapper");
const wider = [...boxes].filter((box) => !fits(box)).map((box) => box.innerText.slice(0, 80));
return fits(document.documentElement) ? wider : [...wider, "the page"];
"""
"""Returns the beginnings of the tables that have to be scrolled sideways, and whether the page has
to be."""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    require(browser=True)
    with chromium.running(width=WIDTH) as browser:
        yield browser


def found(site: Path, chrome: Chrome, question: str) -> list[str]:
    """The pages that the search of the site shows, the first one first."""
    chrome.get(f"{(site / 'search.html').as_uri()}?{urlencode({'q': question})}")
    wait_until(
        lambda: "finished" in chrome.find_element(By.CSS_SELECTOR, ".search-summary").text,
        "the search has not ended",
    )
    links = chrome.find_elements(By.CSS_SELECTOR, "#search-results li > a")
    targets = [link.get_attribute("href").partition("#")[0] for link in links]
    prefix, suffix = f"{site.as_uri()}/", ".html"
    return list(dict.fromkeys(target[len(prefix) : -len(suffix)] for target in targets))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page_that_answers(site: Path, chrome: Chrome, question: str) -> None:
    shown = found(site, chrome, question)
    assert QUESTIONS[question] in shown[:LOOKED_AT], f"of {len(shown)}: {shown[:8]}"


def test_the_tables_fit_the_window(site: Path, chrome: Chrome) -> None:
    pages = [page for page in sorted(site.rglob("*.html")) if "<table" in page.read_text()]
    assert len(pages) > 50
    wider = {}
    for page in pages:
        chrome.get(page.as_uri())
        if tables := chrome.execute_script(WIDER):
            wider[str(page.relative_to(site))] = tables
    assert not wider
