"""The screens in other languages: nothing of ours stays in English."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import translation

from kjo_django import registry
from kjo_django.admin.dashboard import screens
from kjo_django.models import Job
from tests import catalogues
from tests.catalogues import LANGUAGES
from tests.dashboard.conftest import url
from tests.dashboard.test_widths import ERROR, QUEUE, address_of, long_names
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)
__all__ = ["long_names"]

MARKED = re.compile(r"⟦[^⟦⟧]*⟧")
SHOWN = {"alt", "aria-label", "placeholder", "title", "data-label"}
SYNTAX = (
    'queue:emails state:failed since:2h error:"rate limit"',
    "id: queue: handler: state: attempts: since: until: workflow: stage:",
    "unique: key: error: args.name:",
)
"""Of the search for jobs."""
DATA = re.compile(
    "|".join(
        [
            *map(re.escape, (QUEUE, ERROR.split(":")[0])),
            r"(?:queue:|job:)?(?:shop|reconcile)[._\w]*",
            r"Reconcile the stock of one order with .* that it has\.",
            r"\b(?:queue:|job:)?(?:ledger|kjo_django)\b[._\w]*",
            r"\b(?:default|emails)\b",
            r"\b(?:django-group|message-\d+|application/json|America/Argentina/ComodRivadavia)\b",
            r"\b[0-9a-f]{8}[0-9a-f-]*",
            r"\w{3} \d+ \w{3} \d{4} [\d:]+ \S+|\d+ \w{3} [\d:]+",
            r"-dlq\b",
            *map(re.escape, SYNTAX),
            r'"\w+": ',
        ]
    )
)
"""What is data, in every language."""
NAMES = {
    *("Django", "Tasks"),
    *("FAILED", "failed"),  # the states as Django Tasks and our own tables call them
    *("Refused", "order"),  # of an error and an argument
    # Checks, as kjo_health and its options call them
    *("settings", "database", "coordination", "transports", "topics", "relay", "workers"),
    *("clocks", "handlers", "lag", "failures", "progress", "lanes", "rescues", "scaling"),
    "schedules",
}
"""Names that programs and people share in every language."""


class _Texts(HTMLParser):
    """Collects what is shown of our part of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._depth = 0
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id") == "content" or self._depth:
            self._depth += tag not in ("input", "br", "hr", "img", "meta", "link")
            self._skipped += tag in ("code", "pre", "script", "style", "option", "kbd")
            self.found += [value or "" for name, value in attrs if name in SHOWN]

    def handle_endtag(self, tag: str) -> None:
        if self._depth:
            self._depth -= 1
            self._skipped -= tag in ("code", "pre", "script", "style", "option", "kbd")

    def handle_data(self, data: str) -> None:
        if self._depth and not self._skipped:
            self.found.append(data)


def shown(page: str) -> list[str]:
    parser = _Texts()
    parser.feed(page)
    return [text.strip() for text in parser.found if text.strip()]


@pytest.fixture
def marked(settings: Any, tmp_path: Path, forgotten_definitions: None) -> None:
    """A language in which each text of ours stands between brackets, and no handler but those of
    the project: others that tests of this process have declared may be called anything."""
    for handler in registry.handlers():
        if not handler.function.__module__.startswith(("tests.ledger", "kjo_django")):
            registry.unregister(handler.name)
    texts = {
        msgid if plural is None else f"{msgid}\0{plural}": (
            f"⟦{msgid}⟧" if plural is None else f"⟦{msgid}⟧\0⟦{plural}⟧"
        )
        for msgid, plural in catalogues.asked_for().items()
    }
    file = tmp_path / "eo" / "LC_MESSAGES" / "django.mo"
    catalogues.write_mo(file, texts, "nplurals=2; plural=(n != 1);")
    settings.LOCALE_PATHS = [tmp_path]
    settings.LANGUAGE_CODE = "eo"


def test_every_text_of_every_screen_is_translated(
    marked: None, everybody: Client, long_names: dict[str, tuple[Any, ...]]
) -> None:
    left: dict[str, set[str]] = {}
    for screen in screens():
        if screen.is_action:
            continue
        page = everybody.get(address_of(screen.name, long_names)).content.decode()
        assert "⟦" in page, screen.name
        rest = DATA.sub(" ", "\n".join(shown(page)))
        while MARKED.search(rest):
            rest = MARKED.sub(" ", rest)
        # Other tests of this process may have declared queues, which are listed.
        if words := words_of(rest) - NAMES - words_of(" ".join(registry.queue_names())):
            left[screen.name] = words
    assert left == {}


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{3,}", text))


def test_text_outside_of_the_catalogue_is_found() -> None:
    page = '<div id="content"><p title="⟦a⟧ b">⟦c ⟦d⟧⟧<code>e</code></p></div><p>f</p>'
    assert shown(page) == ["⟦a⟧ b", "⟦c ⟦d⟧⟧"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_screen_is_shown_in_german_and_spanish(
    settings: Any, everybody: Client, long_names: dict[str, tuple[Any, ...]], language: str
) -> None:
    settings.LANGUAGE_CODE = language
    for screen in screens():
        if not screen.is_action:
            response = everybody.get(address_of(screen.name, long_names))
            assert response.status_code == 200, screen.name
            assert f'lang="{language}"' in response.content.decode()


def test_the_page_of_a_job_is_in_spanish(settings: Any, everybody: Client) -> None:
    settings.LANGUAGE_CODE = "es"
    job = JobFactory(failed=True, queue="emails", handler="ledger.write")
    page = everybody.get(url("job", job.pk)).content.decode()
    texts = shown(page)
    assert {"Cola", "Intentos", "Fallido", "Cronología", "Carga útil"} <= set(texts)
    assert Job.objects.get().state == "failed"
    assert not {"Queue", "Attempts", "Failed", "Timeline", "Payload"} & set(texts)


def test_the_result_of_checks_is_kept_by_language(settings: Any, everybody: Client) -> None:
    """Those who read German and Spanish share a cache, and each reads their own language."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    found = []
    with translation.override("en-us"):  # the middleware leaves its language to the thread
        for language in ("de", "es", "de"):
            response = everybody.get(url("status"), headers={"accept-language": language})
            found.append(response.content.decode())
    assert "Starten Sie manage.py kjo_consume." in found[0]
    assert "Inicie manage.py kjo_consume." in found[1]
    assert "Starten Sie manage.py kjo_consume." in found[2]
