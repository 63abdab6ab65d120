"""What nobody is shown, and how it comes back from who edits the rest."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kjo_django import job
from kjo_django.exceptions import MessageError
from kjo_django.messages.serializers import dump_result
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import dead_letters, redaction, search
from kjo_django.operations.redaction import (
    REDACTED,
    redacted,
    restored,
    shown_payload,
    shown_result,
    shown_value,
)
from tests.factories import DeadLetterFactory, JobFactory, JobFailureFactory
from tests.unit.deliveries import as_job

pytestmark = pytest.mark.usefixtures("forgotten_definitions")


def build(value, **columns) -> Job:
    return JobFactory.build(payload=json.dumps(value).encode(), **columns)


# --- Shown ----------------------------------------------------------------------------------------


def test_a_handler_hides_fields_of_its_own_in_payload_result_and_dead_letter():
    # Given
    as_job(lambda iban: None, "tests.pay", redact=("iban",))
    value = {"iban": "DE00", "to": [{"IBAN_2": "DE01", "name": "ada"}], "password": "x"}
    shown = {"iban": REDACTED, "to": [{"IBAN_2": REDACTED, "name": "ada"}], "password": REDACTED}
    # Then
    paying = build(value, handler="tests.pay", result=dump_result(value))
    assert shown_payload(paying) == shown
    assert shown_result(paying) == shown
    letter = DeadLetterFactory.build(handler="tests.pay", value=json.dumps(value).encode())
    assert shown_value(letter) == shown
    # And only of its own
    as_job(lambda iban: None, "tests.other")
    assert shown_payload(build(value, handler="tests.other"))["iban"] == "DE00"


def test_what_a_renamed_handler_hid_stays_hidden_in_its_old_jobs():
    # Given jobs of a name that no handler has any more
    as_job(lambda iban: None, "tests.transfer", redact=("iban",))
    value = {"iban": "DE00", "name": "ada"}
    old = build(value, handler="tests.pay", result=dump_result(value))
    letter = DeadLetterFactory.build(handler="tests.pay", value=json.dumps(value).encode())
    # Then
    shown = {"iban": REDACTED, "name": "ada"}
    assert (shown_payload(old), shown_result(old), shown_value(letter)) == (shown, shown, shown)


@pytest.mark.parametrize("redact", ["iban", ("",), (1,), 7])
def test_what_is_to_be_hidden_is_a_list_of_names(redact):
    with pytest.raises(ValueError, match="redact must be"):
        job(redact=redact)


def test_what_cannot_be_shown_is_told_in_words():
    assert "Not valid" in shown_payload(JobFactory.build(payload=b"\xff{"))
    assert "No serializer" in shown_payload(build({}, content_type="image/png"))
    assert shown_payload(build("x" * 100_001)) == "<100,003 bytes: too long to be shown>"
    assert shown_result(JobFactory.build(result=None)) is None
    assert "bytes:" in shown_result(JobFactory.build(result=b'{"no": "wrap"}'))
    assert shown_value(DeadLetterFactory.build(value=None)) is None


def test_what_is_shown_can_be_written_as_json_and_as_a_page():
    shown = shown_payload(JobFactory.build(payload=b'{"a": "\\ud800"}'))
    assert json.dumps(shown, allow_nan=False).encode()
    assert str(shown).encode()


def test_other_serializers_values_are_told_in_words():
    pytest.importorskip("msgpack")
    from kjo_django.messages.serializers import serializer_for

    data = serializer_for("application/msgpack").dumps({"b": b"123", "token": b"1"})
    job = JobFactory.build(payload=data, content_type="application/msgpack")
    assert shown_payload(job) == {"b": "<3 bytes>", "token": REDACTED}


# --- Coming back ----------------------------------------------------------------------------------

SECRETS = {
    "user": {"name": "ada", "password": "p"},
    "cards": [{"token": "t1", "n": 1}, {"token": "t2", "n": 2}],
    "api_key": None,
}


def test_an_editor_who_never_saw_the_secrets_keeps_them():
    # Given
    edited = redacted(SECRETS)
    edited["user"]["name"] = "eve"
    edited["cards"][1]["n"] = 3
    edited["new"] = [1]
    # Then
    assert restored(edited, SECRETS) == {
        "user": {"name": "eve", "password": "p"},
        "cards": [{"token": "t1", "n": 1}, {"token": "t2", "n": 3}],
        "api_key": None,
        "new": [1],
    }


def test_an_editor_may_write_a_secret_or_leave_it_out():
    edited = {"user": {"password": "new"}, "cards": [], "api_key": REDACTED}
    assert restored(edited, SECRETS) == {"user": {"password": "new"}, "cards": [], "api_key": None}


@pytest.mark.parametrize(
    ("edited", "told"),
    [
        ({"note": REDACTED}, "note is [redacted], but nothing was hidden there"),
        ({"user": {"secret": REDACTED}}, "user.secret is [redacted]"),
        ({"user": [REDACTED]}, "user had 0 items and now has 1"),
        ({"cards": [{"token": REDACTED}]}, "cards had 2 items and now has 1: which hidden value"),
        ({"cards": [{"token": "a"}, {"other": REDACTED}]}, "cards[1].other is [redacted]"),
        (REDACTED, "the value is [redacted]"),
    ],
)
def test_a_mark_without_an_original_is_refused(edited, told):
    with pytest.raises(ValueError) as caught:
        restored(edited, *([] if edited == REDACTED else [SECRETS]))
    assert told in str(caught.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "token", "my_password"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_JSON)
def test_what_is_hidden_and_restored_is_what_it_was(value):
    assert restored(redacted(value), value) == value


@pytest.mark.django_db
class TestEditAndReplay:
    """The operation that takes the edited value."""

    def test_the_hidden_fields_of_a_job_run_again_as_they_were(self):
        letter = DeadLetterFactory(of_job=True, value=b'{"token": "t", "a": 1}')
        shown = {**shown_value(letter), "a": 2}
        # When
        report = dead_letters.edit_and_replay(letter.pk, json.dumps(shown).encode(), actor="ann")
        # Then
        assert report.replayed == 1
        assert Job.objects.get().arguments == {"token": "t", "a": 2}
        assert DeadLetter.objects.get().arguments == {"token": "t", "a": 1}

    def test_what_was_edited_in_full_is_kept_byte_for_byte(self):
        letter = DeadLetterFactory(of_job=True, value=b'{"token": "t"}')
        dead_letters.edit_and_replay(letter.pk, b'{ "token" :  "new" }')
        assert bytes(Job.objects.get().payload) == b'{ "token" :  "new" }'

    @pytest.mark.parametrize("value", [b'{"a": 1}', b"\xff", None])
    def test_a_mark_that_stands_for_nothing_changes_nothing(self, value):
        letter = DeadLetterFactory(of_job=True, value=value)
        with pytest.raises(ValueError, match="nothing was hidden there"):
            dead_letters.edit_and_replay(letter.pk, b'{"token": "[redacted]"}')
        letter.refresh_from_db()
        assert letter.state == "open"


def test_nothing_is_marked_by_chance():
    assert not redaction.is_marked({"a": ["redacted", "x [redacted]"]})
    assert redaction.is_marked({"a": [{"b": REDACTED}]})


@pytest.mark.django_db
@pytest.mark.parametrize("depth", [200, 480, 900])
def test_a_deeply_nested_edit_is_replayed_or_refused(depth):
    letter = DeadLetterFactory(of_job=True)
    try:
        report = dead_letters.edit_and_replay(
            letter.pk, b'{"a": %s}' % (b"[" * depth + b"]" * depth)
        )
    except (MessageError, ValueError) as error:
        assert "nested too deeply" in str(error)
    else:
        assert report.replayed == 1


@pytest.mark.parametrize("depth", [5, redaction.DEEPEST - 1, redaction.DEEPEST + 1, 500])
def test_a_secret_is_shown_at_no_depth(depth):
    value = {"password": "xyzzy"}
    for level in range(depth):
        value = {"inner": value} if level % 2 else [value]
    shown = redaction.redacted(value)
    assert "xyzzy" not in repr(shown)
    assert redaction.REDACTED in repr(shown)


# --- What is secret -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        *("pwd", "DB_PWD", "credentials", "aws-credential", "private_key", "privateKey"),
        *("passphrase", "pass-phrase", "auth", "basic_auth", "X-Auth", "oauth", "authorisation"),
        *("session", "sessionid", "session_id", "dsn", "SENTRY_DSN", "api-key", "X-Api-Key"),
        *("api_key", "apikey", "apiKey", "access-key", "AWS_ACCESS_KEY_ID", "Set-Cookie"),
    ],
)
def test_common_names_of_secrets_are_hidden_by_default(field):
    assert redacted({field: "s3cret", "n": 1}) == {field: REDACTED, "n": 1}


@pytest.mark.parametrize("field", ["author", "co_authors", "authority", "friends_name", "records"])
def test_what_only_looks_like_one_is_shown(field):
    assert redacted({field: "ada"}) == {field: "ada"}


def test_a_name_in_the_settings_is_found_whatever_is_between_its_words(settings):
    settings.KJO = {"REDACT": ("tax-number", "author")}
    hidden = {"tax_number": 1, "TaxNumber": 2, "taxnumber": 3, "author": 4}
    assert redacted(hidden) == dict.fromkeys(hidden, REDACTED)


PAIRS = [
    {"name": "password", "value": "hunter2"},
    {"Key": "X-Api-Key", "Value": "hunter2"},
    {"field": "auth", "values": ["hunter2", "x"]},
    {"name": "colour", "value": "red"},
]
NESTED = json.dumps({"user": "ada", "password": "hunter2"}, indent=2)
TWICE = json.dumps([NESTED])


def test_the_value_beside_the_name_of_a_secret_is_hidden():
    assert redacted(PAIRS) == [
        {"name": "password", "value": REDACTED},
        {"Key": "X-Api-Key", "Value": REDACTED},
        {"field": "auth", "values": REDACTED},
        {"name": "colour", "value": "red"},
    ]


@pytest.mark.parametrize("text", [NESTED, TWICE, json.dumps(PAIRS), "  " + NESTED])
def test_secrets_within_a_text_that_is_json_are_hidden(text):
    shown = redacted({"body": text})["body"]
    assert "hunter2" not in shown
    assert REDACTED in shown
    assert "ada" in shown or "colour" in shown


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "{not json", "[", "plain", "{}"])
def test_other_texts_are_shown_as_they_are(text):
    assert redacted([text]) == [text]


def test_a_text_too_deep_to_be_looked_into_is_not_shown():
    deep = "[" * 5_000 + '{"password": "hunter2"}' + "]" * 5_000
    assert "hunter2" not in str(redacted({"body": deep}))


@pytest.mark.parametrize("value", [PAIRS, {"body": NESTED}, {"body": TWICE}, [json.dumps(PAIRS)]])
def test_what_was_hidden_there_comes_back_too(value):
    assert restored(redacted(value), value) == value


def test_a_text_that_is_json_is_edited_around_its_secrets():
    edited = redacted({"body": NESTED})["body"].replace("ada", "eve")
    back = restored({"body": edited}, {"body": NESTED})
    assert json.loads(back["body"]) == {"user": "eve", "password": "hunter2"}
    with pytest.raises(ValueError, match="nothing was hidden there"):
        restored({"body": edited}, {"body": "other"})


@pytest.mark.django_db
def test_what_is_hidden_is_not_found_by_guessing():
    """A search that finds a job tells what is in it."""
    payload = {"fields": PAIRS, "body": NESTED, "colour": "red"}
    found = JobFactory(payload=json.dumps(payload).encode())
    for guess in (
        "args.fields.value:hunter2",
        "args.fields.0.value:hunter2",
        f"args.body:{json.dumps(NESTED)}",
        f"args.fields.value:{REDACTED}",
    ):
        assert list(search.find(search.parse(guess))) == [], guess
    for known in ("args.fields.value:red", "args.colour:red", "args.fields.0.name:password"):
        assert list(search.find(search.parse(known))) == [found], known


def test_instead_of_a_text_that_may_quote_a_payload_the_type_of_the_latest_error_is_shown(
    any_database,
):
    # Given
    twice, at_random, well = (JobFactory(error=error) for error in ("no 7", "no 8", ""))
    JobFailureFactory(job=twice, error_type="TimeoutError")
    JobFailureFactory(job=twice, error_type="ValueError")
    # When
    redaction.hide_texts(jobs := [twice, at_random, well])
    # Then
    assert [job.error for job in jobs] == ["ValueError", redaction.REDACTED, ""]
