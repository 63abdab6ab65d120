"""The catalogues of German and Spanish: complete, in step with the code, and used."""

from __future__ import annotations

import ast
import gettext
import io
import json
import re
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import django
import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.test import RequestFactory
from django.utils import translation

from kjo_django.contrib.celery_codemod.migration_report import KINDS
from kjo_django.contrib.health import HealthView
from kjo_django.models import DeadLetterState
from kjo_django.operations import jobs, schedules
from kjo_django.operations.maintenance.prune import Retention, prune
from kjo_django.operations.monitoring import health
from kjo_django.operations.translations import PATTERNS, TEXTS, translated
from kjo_django.personal_data import erasure
from kjo_django.schedules.shown import ScheduleState
from kjo_django.states import JobStatus, WorkflowState
from tests import catalogues
from tests.catalogues import LANGUAGES, PACKAGE, Entry, path_of, placeholders
from tests.factories import JobFactory
from tests.unit.deliveries import on_memory

every_language = pytest.mark.parametrize("language", LANGUAGES)


# --- The files ------------------------------------------------------------------------------------


@every_language
def test_the_catalogue_has_what_code_and_templates_ask_for_and_no_more(language: str) -> None:
    asked_for = catalogues.asked_for()
    entries = {entry.msgid: entry.plural for entry in catalogues.read(path_of(language))}
    assert len(asked_for) > 1000
    assert sorted(entries.keys() - asked_for.keys()) == []
    assert sorted(asked_for.keys() - entries.keys()) == []
    plurals = {msgid for msgid, plural in asked_for.items() if plural is not None}
    assert plurals == {msgid for msgid, plural in entries.items() if plural is not None}


@every_language
def test_every_text_is_translated_in_each_of_its_forms_and_none_is_a_guess(language: str) -> None:
    entries = catalogues.read(path_of(language))
    forms = _compiled(language)[""]
    count = int(re.search(r"nplurals=(\d)", forms)[1])  # type: ignore[index]
    for entry in entries:
        assert "fuzzy" not in entry.flags, entry.msgid
        assert all(text.strip() for text in entry.texts), entry.msgid
        assert len(entry.texts) == (1 if entry.plural is None else count), entry.msgid


@every_language
def test_a_translation_has_the_placeholders_of_its_text(language: str) -> None:
    for entry in catalogues.read(path_of(language)):
        wanted = [placeholders(entry.plural or entry.msgid), placeholders(entry.msgid)]
        for text in entry.texts:
            assert placeholders(text) in wanted, (entry.msgid, text)


@every_language
def test_a_translation_begins_and_ends_as_its_text(language: str) -> None:
    """Texts are put together: a blank at an end, a full stop, a colon belong to the text."""
    for entry in catalogues.read(path_of(language)):
        for text in entry.texts:
            assert _ends(text) == _ends(entry.msgid), (entry.msgid, text)


def test_no_text_is_asked_for_within_an_f_string() -> None:
    """The programs of gettext do not see it there, and would drop it from the catalogues."""
    assert list(catalogues.within_f_strings(ast.parse("f'{_(\"a\")} {b}'; _('c')"))) == ["a"]
    found = [
        (path.name, text)
        for path in PACKAGE.rglob("*.py")
        for text in catalogues.within_f_strings(ast.parse(path.read_text()))
    ]
    assert found == []


@every_language
def test_a_text_that_begins_with_a_field_does_so_in_its_translation(language: str) -> None:
    """A form leaves the field out: it shows the text beside it."""
    found = [
        entry.msgid
        for entry in catalogues.read(path_of(language))
        if all(text.startswith("%(field)s") for text in (entry.msgid, *entry.texts))
    ]
    assert len(found) > 5
    asked = [text for text in catalogues.asked_for() if text.startswith("%(field)s")]
    assert sorted(found) == sorted(asked)


@every_language
def test_the_compiled_catalogue_is_that_of_the_text_file(language: str) -> None:
    compiled = _compiled(language)
    compiled.pop("")
    assert compiled == dict(_keys_and_texts(catalogues.read(path_of(language))))


@every_language
def test_words_that_django_translates_too_are_translated_the_same(language: str) -> None:
    """All catalogues of a project are one: ours would change the words of Django's own pages."""
    ours, same = _compiled(language), 0
    root = Path(django.__file__).parent
    for app in ("conf", "contrib/admin", "contrib/auth", "contrib/contenttypes"):
        with (root / app / "locale" / language / "LC_MESSAGES/django.mo").open("rb") as file:
            theirs = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key in (ours.keys() & theirs.keys()) - {""}:
            assert ours[key] == theirs[key], (app, key)
            same += 1
    assert same > 10


def test_the_placeholders_of_a_text_are_found() -> None:
    assert placeholders("%(b)s of %(a).1f%% in {c}, %d and %.300r") == [
        *("%%", "%(a).1f", "%(b)s", "%.300r", "%d", "{c}")
    ]


def _ends(text: str) -> tuple[bool, str]:
    end = text[-1] if text[-1] in ".:?… " else ""
    return text[0] == " ", end


def _compiled(language: str) -> dict[Any, str]:
    with path_of(language, "mo").open("rb") as file:
        return dict(gettext.GNUTranslations(file)._catalog)  # type: ignore[attr-defined]


def _keys_and_texts(entries: list[Entry]) -> Iterator[tuple[Any, str]]:
    for entry in entries:
        if entry.plural is None:
            yield entry.msgid, entry.texts[0]
        else:
            yield from (((entry.msgid, form), text) for form, text in enumerate(entry.texts))


# --- Templates have no bare text ------------------------------------------------------------------

TAGS = re.compile(
    r"{% *blocktrans(?:late)?\b.*?{% *endblocktrans(?:late)? *%}|{%.*?%}|{{.*?}}|{#.*?#}", re.DOTALL
)
SHOWN_ATTRIBUTES = {"alt", "aria-label", "placeholder", "title", "value", "data-label"}
BARE = {
    "python manage.py kjo_consume",
    'error:"rate limit"',
    "queue:emails state:failed since:2h",
    "id: queue: handler: state: attempts: since: until: workflow: stage:",
    "unique: key: error: args.name:",
    "kjo-dashboard",
    "Django Tasks:",
    *("j", "k", "x", "r", "Enter", "Esc", "Shift"),
}
"""What is the same in every language: commands, keys, the syntax of a search."""


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        is_state = tag in ("button", "input")  # whose value is sent, or shown by a submit button
        shown = SHOWN_ATTRIBUTES - ({"value"} if is_state or tag == "option" else set())
        self.found += [value or "" for name, value in attrs if name in shown]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.html")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_template_has_no_text_outside_translation_tags(path: Path) -> None:
    assert bare_texts(path.read_text()) - BARE == set()


def test_bare_text_in_a_template_is_found() -> None:
    source = (
        '<p title="One">{% translate "Two" %} Three {{ four }}</p><b>{% if five %}Six{% endif %}'
    )
    assert bare_texts(source) == {"One", "Three", "Six"}


def bare_texts(source: str) -> set[str]:
    parser = _Texts()
    parser.feed(TAGS.sub("\f", source))
    parts = (part.strip() for text in parser.found for part in text.split("\f"))
    return {part for part in parts if any(c in string.ascii_letters for c in part)}


# --- Words for values that are stored or compared -------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        *(jobs.CancelResult, jobs.RequeueResult, jobs.ChangeResult, schedules.ScheduleResult),
        *(JobStatus, WorkflowState, ScheduleState, DeadLetterState, KINDS),
    ],
    ids=str,
)
def test_every_value_that_a_command_prints_has_a_word(values: Any) -> None:
    texts = {str(getattr(each, "value", each)) for each in values}
    assert texts - TEXTS == set()


@pytest.mark.django_db
def test_every_kind_of_row_that_is_pruned_or_erased_has_a_word(settings: Any) -> None:
    with on_memory(settings):
        kinds = prune(Retention.of_settings(), dry_run=True)
    assert kinds
    assert kinds.keys() - TEXTS == set()
    reasons = {getattr(erasure, name) for name in ("OPEN_JOBS", "STEPS", "KEPT_WORKFLOWS")}
    reasons |= {erasure.WAITING_MESSAGES, erasure.SCHEDULES}
    assert reasons - TEXTS == set()
    with translation.override("de"):
        report = erasure.Report(is_dry_run=True, mode=erasure.Mode.DELETE)
        report.kept[erasure.SCHEDULES], report.unreadable["jobs"] = 1, 2
        left = erasure.left(report)
        assert len(left) == 6
        assert [text for text in left if translated(text) == text] == []


def test_a_word_is_translated_and_a_name_is_not() -> None:
    with translation.override("de"):
        assert translated("cancelled") == "abgebrochen"
        assert translated("the job is completed") == "der Job ist abgeschlossen"
        assert translated("orders") == "orders"
    assert [translated(text) for text in (*TEXTS, *PATTERNS)] == [*TEXTS, *PATTERNS]


# --- What people read -----------------------------------------------------------------------------


@pytest.fixture
def german(settings: Any) -> Iterator[None]:
    settings.LANGUAGE_CODE = "de"
    with on_memory(settings, QUEUES={"default": {}}):
        yield


def printed(name: str, *arguments: str) -> str:
    out = io.StringIO()
    with suppress(SystemExit):  # not well: there is no worker
        call_command(name, *arguments, stdout=out, no_color=True)
    return out.getvalue()


@pytest.mark.django_db
def test_health_speaks_german(german: None) -> None:
    text = printed("kjo_health", "--timeout", "20")
    assert re.search(r"^ok +settings +Dienst '\w+', \d+ Warteschlangen?$", text, re.MULTILINE)
    assert re.search(r"^FEHLER +workers +0 aktiv", text, re.MULTILINE)
    assert "Starten Sie manage.py kjo_consume." in text
    assert not re.search(r"\b(not|the|jobs|Start|Run)\b", text)


@pytest.mark.django_db
def test_commands_speak_german(german: None) -> None:
    JobFactory.create_batch(2, queue="default", state="queued")
    heading, row, *_others, no_worker = printed("kjo_status").splitlines()
    assert heading.split()[:4] == ["Warteschlange", "wartend", "ausstehend", "geplant"]
    assert row.split()[0] == "default"
    assert no_worker == "Kein Worker ist aktiv; starten Sie einen mit manage.py kjo_consume"
    lines = printed("kjo_prune", "--dry-run").splitlines()
    assert "fehlgeschlagene Jobs: 0 würden gelöscht" in lines
    assert not [line for line in lines if "_" in line]


@pytest.mark.django_db
def test_a_refused_command_says_so_in_german(german: None) -> None:
    with pytest.raises(CommandError, match="Nennen Sie die Zeitpläne"):
        call_command("kjo_schedule", "pause")
    with pytest.raises(CommandError, match=r"timeout: 'soon' ist keine Zahl von Sekunden"):
        call_command("kjo_health", timeout="soon")


@pytest.mark.django_db
def test_a_value_that_an_operation_refuses_is_named_in_german(german: None) -> None:
    with pytest.raises(CommandError, match=r"Keine Warteschlange heißt 'defalt'\. Meinten"):
        call_command("kjo_limits", "set", "queue:defalt", "--rate", "1/s")
    with pytest.raises(CommandError, match=r"No queue is named 'defalt'\. Did you"):
        call_command("kjo_limits", "set", "queue:defalt", "--rate", "1/s", "--json")


@pytest.mark.django_db
@pytest.mark.parametrize("command", ["kjo_health", "kjo_status", "kjo_prune", "kjo_topics"])
def test_json_is_in_english_in_every_language(settings: Any, command: str) -> None:
    more = {"kjo_topics": ["plan"], "kjo_health": ["--timeout", "20"]}.get(command, [])
    found = []
    for language in ("en-us", *LANGUAGES):
        settings.LANGUAGE_CODE = language
        with on_memory(settings, QUEUES={"default": {}}):
            found.append(json.loads(printed(command, "--json", *more)))
    for answer in found:
        answer.pop("now", None)
    assert found[0] == found[1] == found[2]


@pytest.mark.django_db
def test_checks_of_a_deployment_are_in_english(german: None, monkeypatch: Any) -> None:
    found = health.Check(health.TOPICS, False, "x", "y")
    asked: list[Callable[[], str | None]] = []

    def checks(*args: Any, **options: Any) -> list[health.Check]:
        asked.append(translation.get_language())  # type: ignore[arg-type]
        return [found]

    monkeypatch.setattr(health, "health", checks)
    messages = [each.id for each in run_checks(tags=["kjo"], include_deployment_checks=True)]
    assert "kjo.W010" in messages
    assert asked == [None]


@pytest.mark.django_db
def test_the_health_view_is_in_english(german: None, rf: RequestFactory, admin_user: Any) -> None:
    request = rf.get("/health/")
    request.user = admin_user
    answer = json.loads(HealthView.as_view()(request).content)
    texts = {each["detail"] for each in answer["checks"]}
    assert any(text.startswith("service ") for text in texts)
