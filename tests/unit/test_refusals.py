"""What operations say when they refuse a value: English for programs, translated for people."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import translation

from kjo_django import values
from kjo_django.limits import control
from kjo_django.models import Workflow
from kjo_django.operations import queues, search
from kjo_django.operations.rows import checked_rate
from kjo_django.operations.translations import decimal
from kjo_django.personal_data.person import Person
from kjo_django.refusals import RefusedError, shown
from kjo_django.workflows import lists

pytestmark = pytest.mark.small


@pytest.mark.parametrize(
    ("refused", "english", "german"),
    [
        (
            lambda: search.parse("state:faild"),
            "'faild' is not a state; did you mean failed?",
            "'faild' ist kein Zustand; meinten Sie failed?",
        ),
        (
            lambda: search.parse("stat:failed"),
            "There is no stat: to search by; did you mean state:? To look for the text itself, "
            "quote it.",
            "Nach stat: kann nicht gesucht werden; meinten Sie state:? Um den Text selbst zu "
            "suchen, setzen Sie ihn in Anführungszeichen.",
        ),
        (
            lambda: checked_rate(0),
            "The rate must be a number from 0.01 to 100,000 a second, not 0",
            "Die Rate muss eine Zahl von 0,01 bis 100.000 je Sekunde sein, nicht 0",
        ),
        (
            lambda: control.check_value("job:a", "burst", 0),
            "burst must be a whole number from 1 to 1,000,000, not 0",
            "burst: Erwartet wird eine ganze Zahl von 1 bis 1.000.000; gegeben ist 0",
        ),
        (
            lambda: control.check_value("queue:a", "concurrency", 1),
            "concurrency must be of a job; that of a queue in one worker is changed by "
            "set_policy()",
            "concurrency gibt es nur für Jobs; die einer Warteschlange in einem Worker ändert "
            "set_policy()",
        ),
        (
            lambda: queues.set_policy("default", backoff_base=0),
            "backoff_base must be a whole number of seconds from 1 to 86,400, or None",
            "backoff_base muss eine ganze Zahl von Sekunden von 1 bis 86.400 sein, oder None",
        ),
        (
            lambda: control.check_value("job:a", "rate", "5"),
            "rate must be a rate such as '5/s', '100/m' or '10/30s'; it has no '/', not '5'",
            "rate: Erwartet wird eine Rate wie '5/s', '100/m' oder '10/30s'; '/' fehlt; gegeben "
            "ist '5'",
        ),
        (
            lambda: values.rate("x/s"),
            "a rate such as '5/s', '100/m' or '10/30s'; 'x' before the '/' is no whole number",
            "eine Rate wie '5/s', '100/m' oder '10/30s'; 'x' vor '/' ist keine ganze Zahl",
        ),
        (
            lambda: values.rate("2000000/s"),
            "a rate such as '5/s', '100/m' or '10/30s'; 2000000 is not from 1 to 1,000,000",
            "eine Rate wie '5/s', '100/m' oder '10/30s'; 2000000 liegt nicht zwischen 1 und "
            "1.000.000",
        ),
        (
            lambda: Person.of(),
            "Name the person: give at least one key, id or value of a field",
            "Nennen Sie die Person: mindestens einen Schlüssel, eine ID oder den Wert eines Feldes",
        ),
        (
            lambda: Person.of(keys=["k"] * 1001),
            "Give at most 1,000 keys, ids and fields at once",
            "Geben Sie höchstens 1.000 Schlüssel, IDs und Felder auf einmal an",
        ),
        (
            lambda: Person.parse({"fields": ["customer.email"]}),
            "'customer.email' is not PATH=VALUE, such as customer.email=ada@example.org",
            "'customer.email' ist nicht PFAD=WERT, wie customer.email=ada@example.org",
        ),
        (
            lambda: lists.page(Workflow.objects.none(), after="here"),
            "'here' is no place in a list of workflows",
            "'here' ist keine Stelle in einer Liste von Workflows",
        ),
        (
            lambda: search.page(search.JobFilter(), size=0),
            "A page has 1 to 500 rows",
            "Eine Seite hat 1 bis 500 Zeilen",
        ),
    ],
)
def test_a_refused_value_is_english_for_programs_and_translated_for_people(
    refused: Callable[[], Any], english: str, german: str
) -> None:
    with translation.override("de"):
        # When
        with pytest.raises(ValueError) as caught:
            refused()
        # Then
        assert str(caught.value) == english
        assert shown(caught.value) == german
    with translation.override(None):
        assert shown(caught.value) == english


def test_any_other_error_is_shown_as_it_is() -> None:
    with translation.override("de"):
        assert shown(ValueError("not here")) == "not here"


def test_a_refusal_can_be_sent_to_another_process() -> None:
    error = RefusedError("%(name)s: is given twice", name="queue")
    assert str(pickle.loads(pickle.dumps(error))) == "queue: is given twice"


@pytest.mark.parametrize(
    ("language", "written"),
    [("en", "1234.6"), ("de", "1234,6"), ("es", "1234,6"), (None, "1234.6")],
)
def test_a_decimal_has_the_separator_of_the_language(language: str | None, written: str) -> None:
    with translation.override(language):
        assert decimal(1234.56, 1) == written
