"""Loggers of the app: nothing that LOGGING does reaches whoever logs."""

from __future__ import annotations

import logging

import pytest
from django import dispatch

from kjo_django import signals
from kjo_django.exceptions import HandlerTimeout
from kjo_django.logs import FOREIGN, Logger, contain_others, get_logger
from kjo_django.signals import Signal


class Raising(logging.Handler):
    """A handler whose ``handle`` raises, which the standard library keeps from nobody."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def handle(self, record: logging.LogRecord) -> bool:
        raise self.error


class ReadingARequest(logging.Filter):
    """A filter as projects have it, which knows only records of a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        return bool(record.request.user)  # type: ignore[attr-defined]


@pytest.fixture
def plain():
    """The standard library's logger of the app, which forgets what is added to it."""
    plain = logging.getLogger("kjo_django")
    level = plain.level
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plain, "handlers", list(plain.handlers))
        patched.setattr(plain, "filters", list(plain.filters))
        patched.setattr(Logger, "_complain_at", 0.0)
        yield plain
    plain.setLevel(level)


@pytest.mark.parametrize("how", ["debug", "info", "warning", "error", "exception", "critical"])
def test_a_handler_that_raises_is_reported_and_raises_nothing(plain, how, capsys):
    plain.addHandler(Raising(AttributeError("no request")))
    plain.setLevel(logging.DEBUG)
    getattr(get_logger("kjo_django"), how)("Job %s", 7)
    told = capsys.readouterr().err
    assert "A filter or a handler of LOGGING failed. The message: Job %s" in told
    assert "AttributeError: no request" in told


def test_a_panic_of_a_library_is_contained_too(plain, capsys):
    class Panic(BaseException):
        """As those of libraries in Rust."""

    plain.addHandler(Raising(Panic("at src/lib.rs:7")))
    get_logger("kjo_django").error("Job")
    assert "at src/lib.rs:7" in capsys.readouterr().err


def test_a_handler_that_logs_itself_is_called_no_more_often_than_without_this(plain, capsys):
    calls = []

    class Recursive(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            calls.append(record)
            if len(calls) > 10_000:
                return False
            for _ in range(2):
                get_logger("kjo_django").error("Twice")
            return True

    plain.addHandler(Recursive())
    get_logger("kjo_django").error("Job")
    assert len(calls) < 10_000
    assert "RecursionError" in capsys.readouterr().err


def test_so_is_a_filter_that_raises(plain, capsys):
    plain.addFilter(ReadingARequest())
    get_logger("kjo_django").error("Job")
    assert "'LogRecord' object has no attribute 'request'" in capsys.readouterr().err


def test_it_is_reported_once_a_minute(plain, capsys, monkeypatch):
    # Given
    seconds = iter([100.0, 130.0, 159.0, 160.0])
    monkeypatch.setattr("kjo_django.logs.time.monotonic", lambda: next(seconds))
    plain.addHandler(Raising(ValueError("broken")))
    # When
    for _ in range(4):
        get_logger("kjo_django").error("Job")
    # Then
    assert capsys.readouterr().err.count("A filter or a handler of LOGGING failed") == 2


def test_the_time_limit_of_a_handler_that_logs_is_raised_on(plain):
    plain.addHandler(Raising(HandlerTimeout("too late")))
    with pytest.raises(HandlerTimeout):
        get_logger("kjo_django").error("Job")


def test_records_have_their_extra_and_name_the_line_that_logs(caplog):
    with caplog.at_level(logging.INFO, "kjo_django"):
        get_logger("kjo_django").info("Job %s", 7, extra={"job_id": 7})
        get_logger("kjo_django").log(logging.INFO, "Job")
    first, second = caplog.records
    assert (first.getMessage(), first.job_id) == ("Job 7", 7)
    assert (first.funcName, first.filename) == (second.funcName, second.filename)
    assert first.funcName == "test_records_have_their_extra_and_name_the_line_that_logs"
    assert first.lineno + 1 == second.lineno


def test_what_the_level_excludes_is_not_made(plain):
    plain.addHandler(Raising(ValueError("asked")))
    plain.setLevel(logging.ERROR)
    get_logger("kjo_django").info("Job")


# --- Loggers of others ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_log_in_a_worker_is_contained(name, monkeypatch, capsys):
    other = logging.getLogger(name)
    monkeypatch.setattr(other, "handlers", [Raising(AttributeError("no request"))])
    monkeypatch.setattr(Logger, "_complain_at", 0.0)
    contain_others()
    handle = other.handle
    contain_others()
    assert other.handle is handle
    other.error("Something")
    assert "AttributeError: no request" in capsys.readouterr().err


# --- Signals, which Django's logger reports on ----------------------------------------------------


class Receiver:
    """An instance as a receiver: it has no ``__qualname__``, which Django asks for."""

    def __call__(self, **facts):
        raise ValueError("a receiver failed")


@pytest.fixture
def broken_dispatch(monkeypatch):
    """What Django logs about signals raises."""
    dispatch = logging.getLogger("django.dispatch")
    monkeypatch.setattr(dispatch, "handlers", [Raising(AttributeError("no request"))])
    monkeypatch.setattr(Logger, "_complain_at", 0.0)


@pytest.mark.usefixtures("broken_dispatch")
def test_a_receiver_that_raises_keeps_nothing_from_the_others(capsys):
    # Given
    signal, heard, raises = Signal(), [], Receiver()

    def hears(**facts):
        heard.append(facts["sender"])

    signal.connect(raises)
    signal.connect(hears)
    # When
    signal.send_robust(sender="a queue")
    # Then
    assert heard == ["a queue"]
    assert "AttributeError: no request" in capsys.readouterr().err


def test_a_receiver_that_cannot_be_shown_keeps_nothing_from_the_others():
    class Unspeakable(Receiver):
        def __repr__(self):
            raise ValueError("no text")

    signal, heard, raises = Signal(), [], Unspeakable()

    def hears(**facts):
        heard.append(facts["sender"])

    signal.connect(raises)
    signal.connect(hears)
    signal.send_robust(sender="a queue")
    assert heard == ["a queue"]


def test_a_receiver_without_a_name_is_logged_as_it_is(caplog):
    signal, raises = Signal(), Receiver()
    signal.connect(raises)
    signal.send_robust(sender="a queue")
    (record,) = caplog.records
    assert record.name == "django.dispatch"
    assert record.getMessage() == (
        f"Error calling {raises!r} in Signal.send_robust() (a receiver failed)"
    )


def test_each_signal_of_the_app_is_of_this_kind():
    names = {name for name, value in vars(signals).items() if isinstance(value, dispatch.Signal)}
    assert names
    assert {name for name in names if type(getattr(signals, name)) is not Signal} == set()
