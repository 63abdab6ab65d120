"""``--processes N``: children are forked, told to stop, and started again when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kjo_django.worker import supervisor

pytestmark = pytest.mark.medium  # of real processes

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys, time, pathlib
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django; django.setup()
from kjo_django.worker import supervisor
place = pathlib.Path(sys.argv[1])

def note(text):
    with open(place / "log", "a") as log:
        log.write(text + "\\n")

def runs():
    return (place / "log").read_text().split() if (place / "log").exists() else []

def stop_well(number, frame):
    note("stopped")
    sys.exit(0)

def wait_for_signal():
    signal.signal(signal.SIGTERM, stop_well)
    signal.signal(signal.SIGINT, stop_well)
    note("ready")
    os.write(1, b"ready\\n")
    while True:
        time.sleep(0.05)  # not longer: a signal that comes just before is handled after it

{body}
sys.exit(supervisor.supervise({count}, lambda place: work(), pins={pins}))
"""
TIRED = """
make = supervisor._Supervisor.__init__

def make_tired(self, *arguments):
    make(self, *arguments)
    self._quick_deaths = 9
    supervisor.LONGEST_DELAY = 256

supervisor._Supervisor.__init__ = make_tired
"""
"""A child has died at once often before: the next one that does is replaced after the longest
delay, which is longer here than any test waits."""


def start(
    tmp_path: Path, body: str, count: int = 1, *, pins: bool = False
) -> subprocess.Popen[str]:
    code = PROGRAM.format(body=body, count=count, pins=pins)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, errors


def log(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def test_it_ends_well_when_every_child_has_finished(tmp_path):
    process = start(tmp_path, "def work():\n    note('done'); return 0", count=3)
    assert finish(process)[0] == 0
    assert log(tmp_path) == ["done"] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_is_passed_on_and_all_are_waited_for(tmp_path, number):
    # Given
    process = start(tmp_path, "work = wait_for_signal", count=2)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    # When
    process.send_signal(number)
    # Then
    assert finish(process)[0] == 0
    assert sorted(log(tmp_path)) == ["ready", "ready", "stopped", "stopped"]


def test_it_never_waits_so_that_a_signal_that_came_just_before_would_wait_too(tmp_path):
    """Promise 3: the stop would be passed on once a child ended by itself, so mostly never."""
    # Given: a stop after Python's last look for signals, which it handles when the call is over
    body = """
real_wait, stops = os.waitpid, [signal.SIGTERM]

def waitpid(pid, flags):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if stops:
        os.kill(os.getpid(), stops.pop())
    try:
        return real_wait(pid, flags)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

os.waitpid = waitpid
work = wait_for_signal
"""
    # When
    process = start(tmp_path, body, count=2)
    # Then
    assert finish(process)[0] == 0


def test_a_signal_that_comes_while_it_forks_reaches_that_child_too(tmp_path):
    """Promise 3: or it would wait for that child for ever."""
    # Given a machine so busy that a child is at work before the parent knows of it
    body = """
real_fork = os.fork

def slow_fork():
    pid = real_fork()
    if pid:
        time.sleep(1)
    return pid

os.fork = slow_fork
work = wait_for_signal
"""
    process = start(tmp_path, body, count=2)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    # When
    process.terminate()
    # Then it is told, and the other one is not started any more
    assert finish(process)[0] == 0
    assert log(tmp_path) == ["ready", "stopped"]


@pytest.mark.parametrize(
    ("death", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("sys.exit(7)", "exit code 7"),
        ("raise ValueError('at boot')", "exit code 70"),
    ],
)
def test_a_child_that_dies_is_replaced(tmp_path, death, told):
    """Promise 3."""
    body = f"""
def work():
    note("run")
    if len(runs()) == 1:
        {death}
    return 0
"""
    process = start(tmp_path, body)
    code, errors = finish(process)
    assert code == 0
    assert log(tmp_path) == ["run", "run"]
    assert f"died ({told}); starting another in 1 s" in errors


def test_a_child_that_a_signal_has_stopped_is_started_again(tmp_path):
    body = """
def work():
    note("run")
    return supervisor.WAS_SIGNALLED if len(runs()) == 1 else 0
"""
    code, errors = finish(start(tmp_path, body))
    assert code == 0
    assert log(tmp_path) == ["run", "run"]
    assert "died" not in errors


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no process can be pinned here")
def test_pinned_children_have_the_processors_in_turn_and_a_replacement_that_of_the_dead(tmp_path):
    # Given
    allowed = sorted(os.sched_getaffinity(0))
    # When of as many children as there are processors, and one more, the second dies
    body = f"""
def work():
    (mine,) = os.sched_getaffinity(0)
    note(str(mine))
    if mine == {allowed[1 % len(allowed)]} and not (place / "died").exists():
        (place / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0
"""
    process = start(tmp_path, body, count=len(allowed) + 1, pins=True)
    # Then
    assert finish(process)[0] == 0
    expected = [*allowed, allowed[0], allowed[1 % len(allowed)]]
    assert sorted(map(int, log(tmp_path))) == sorted(expected)


def test_a_childs_failure_to_stop_well_is_the_exit_code(tmp_path):
    body = """
def fail(number, frame):
    sys.exit(3)

def work():
    signal.signal(signal.SIGTERM, fail)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(0.05)  # not longer: a signal that comes just before is handled after it
"""
    process = start(tmp_path, body)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert finish(process)[0] == 3


def test_a_child_told_to_stop_before_it_listens_has_ended_well(tmp_path):
    """A deployment right after another: nothing had begun, so nobody is to be alarmed."""
    body = "def work():\n    os.write(1, b'ready\\n')\n    time.sleep(60)\n    return 0"
    process = start(tmp_path, body, count=2)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert finish(process)[0] == 0


def test_a_stop_is_heard_while_a_replacement_is_waited_for(tmp_path):
    """A child that dies at once is started again later and later; stopping does not wait for it."""
    # Given: a child that has died at once often before, so the next is long in coming
    body = """
def work():
    note("run")
    return 1
"""
    process = start(tmp_path, TIRED + body)
    assert process.stderr is not None
    while "starting another in 256 s" not in process.stderr.readline():
        pass
    # When
    process.terminate()
    # Then
    finish(process)
    assert log(tmp_path) == ["run"]


@pytest.mark.postgres
def test_children_share_no_connection_of_a_pool(tmp_path, postgres_server):
    """Django's option "pool" on PostgreSQL keeps what the parent has closed open for the next."""
    body = f"""
from django.db import connections
pooled = {{**tests.settings.database({postgres_server.url!r}), "OPTIONS": {{"pool": True}}}}
connections.settings["default"] = connections.configure_settings({{"default": pooled}})["default"]
del connections["default"]

def session():
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), pg_sleep(0.5)")
        return cursor.fetchone()[0]

parents = session()

def work():
    mine = session()
    note(f"{{mine}}")
    return 0
"""
    process = start(tmp_path, "import tests.settings\n" + body, count=2)
    code, errors = finish(process)
    assert code == 0, errors
    sessions = log(tmp_path)
    assert len(set(sessions)) == len(sessions) == 2


def test_a_child_that_dies_is_replaced_though_another_waits_for_its_turn(tmp_path):
    """One that dies at once each time must not cost the others their replacements."""
    # Given: one child dies at once, and its next is long in coming
    body = """
supervisor.QUICK_DEATH = 1.0

def is_first_to(name):
    try:
        (place / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def work():
    if is_first_to("die at once"):
        return 1
    if is_first_to("die later"):
        time.sleep(2)
        return 1
    wait_for_signal()
"""
    process = start(tmp_path, TIRED + body, count=2)
    assert process.stdout is not None
    # Then that one is replaced
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert finish(process)[0] in (0, 1)


def test_a_child_is_a_process_group_of_its_own(tmp_path):
    """A terminal's Ctrl-C reaches the parent only; twice, it would force a child to stop."""
    body = "def work():\n    note(str(os.getpgid(0) == os.getpid())); return 0"
    assert finish(start(tmp_path, body))[0] == 0
    assert log(tmp_path) == ["True"]


def test_the_first_signal_is_no_second_one_for_a_worker_that_ends_by_itself(monkeypatch):
    """A thread of it has died, an operator has stopped it, or all is done: what runs may end."""
    ended = []
    monkeypatch.setattr(supervisor.os, "_exit", ended.append)
    stopping = threading.Event()
    restore = supervisor.stop_on_signals(stopping)
    try:
        stopping.set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [128 + signal.SIGTERM]
    finally:
        has_heard = restore()
    assert has_heard


def test_a_second_signal_ends_the_process_while_the_first_one_is_logged(monkeypatch):
    """It passed for the first one, and the process went on for as long as its jobs may last."""
    ended: list[int] = []
    log = supervisor.logger.info

    def log_slowly(*arguments):
        if not ended:
            os.kill(os.getpid(), signal.SIGTERM)
        log(*arguments)

    monkeypatch.setattr(supervisor.os, "_exit", ended.append)
    monkeypatch.setattr(supervisor.logger, "info", log_slowly)
    restore = supervisor.stop_on_signals(threading.Event())
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        restore()
    assert ended == [128 + signal.SIGTERM]
