"""The harness: a forked process is as a new one would be, and both end when they should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.acceptance.forking import suits
from tests.acceptance.program import Program, has_stopped
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TIMES = 20
BUSY = "while True: pass"
WORKING = """# Six threads that work all the time.
import threading, time

def work():
    while True:
        sum(range(2000))
        time.sleep(0.0001)

for _ in range(6):
    threading.Thread(target=work).start()
print("ready")
"""
TELLING = """# What a process has been given.
import ctypes, json, os, signal, sys, threading

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
handled = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE
sys.stderr.write("to standard error, ")
os.system("echo by a child")
print(json.dumps({
    "arguments": sys.argv,
    "main module": [__name__, sys.modules["__main__"].__spec__.name],
    "folder": os.getcwd(),
    "files": os.listdir("/proc/self/fd"),
    "input": sys.stdin.read(),
    "environment": dict(os.environ),
    "as C sees it": [str(getenv(name)) for name in (b"KJO_TEST_UNKNOWN", b"KJO_TEST_EVENTS")],
    "leads its session": os.getpid() == os.getsid(0) == os.getpgrp(),
    "handlers": [str(signal.getsignal(number)) for number in handled],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakes up": signal.set_wakeup_fd(-1),
    "threads": threading.active_count(),
    "imported": sorted({"kjo_django", "pytest", "tests.settings"} & {*sys.modules}),
}))
"""
SLEEPING = """
import sys, time
from tests.acceptance.manage import die_with_parent

die_with_parent()
assert not sys.stdin.read()
print("ready")
time.sleep(600)
"""
STARTING = """
import os, sys, time
from pathlib import Path
from tests.acceptance.program import Program, has_stopped

if __name__ == "__main__":
    code, log, way, state = sys.argv[1:]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    arguments = ["tests.acceptance.run_code", code]
    program = Program(arguments, environment, Path(log), forked=way == "forked")
    while "ready" not in program.log:
        assert program.is_running, program.log
    if state == "frozen":
        program.freeze()
    print("started", flush=True)
    sys.stdin.read()
else:
    print("this module was imported", flush=True)
"""

Start = Callable[..., Program]


@pytest.fixture(params=["executed", "forked"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Start]:
    """Start processes that run some code, in one way or the other."""
    started: list[Program] = []

    def start(way: str, code: str, *arguments: str, **variables: str) -> Program:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
        log = tmp_path / f"{len(started)}.log"
        command = ["tests.acceptance.run_code", code, *arguments]
        started.append(Program(command, environment, log, forked=way == "forked"))
        return started[-1]

    yield start
    for program in started:
        program.end()


def await_text(program: Program, text: str) -> None:
    wait_until(lambda: text in program.log or not program.is_running, f"{program}: {text}")
    assert text in program.log, program.log


# --- Its beginning --------------------------------------------------------------------------------


def test_a_forked_process_is_given_what_a_new_one_is(
    programs: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a variable of the time when the server was started, and another one of its last process
    monkeypatch.setenv("KJO_TEST_EVENTS", "of the server")
    assert programs("forked", "", KJO_TEST_ITEMS="of another").wait() == 0
    monkeypatch.delenv("KJO_TEST_EVENTS")
    # When
    own = {"KJO_TEST_UNKNOWN": "ledger.write"}
    told = [told_by(programs(way, TELLING, "-a", **own)) for way in ("executed", "forked")]
    # Then
    assert told[1] == told[0]
    assert told[0]["environment"] == {**os.environ, "PYTHONUNBUFFERED": "1", **own}


def told_by(program: Program) -> Any:
    assert program.wait() == 0, program.log
    before, _, answer = program.log.partition("\n")
    assert before == "to standard error, by a child"
    told = json.loads(answer)
    del told["environment"]["KJO_TEST_PARENT"]
    return told


def test_what_a_process_writes_is_added_to_its_log(
    programs: Start, way: str, tmp_path: Path
) -> None:
    (tmp_path / "0.log").write_text("of a process before\n")
    program = programs(way, "print('first'); input()")
    assert program.wait() == 1
    assert program.log.startswith("of a process before\nfirst\nTraceback")
    assert program.log.endswith("EOFError: EOF when reading a line\n")


@pytest.mark.parametrize(
    "variables",
    [
        {"LD_PRELOAD": "libfaketime.so.1"},
        {"PYTHONHASHSEED": "1"},
        {"KJO_TEST_CLOCK_AHEAD": "30"},
        {"KJO_TEST_WITHOUT": "redis"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_what_only_a_new_process_would_heed_is_not_forked(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KJO_TEST_WITHOUT", "PYTHONUNBUFFERED", *variables):
        monkeypatch.delenv(name, raising=False)
    assert suits({**os.environ, "DATABASE_URL": "sqlite:///:memory:", "PYTHONUNBUFFERED": "1"})
    assert not suits({**os.environ, **variables})


# --- Its end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        ("print('done')", 0, "done\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('usage')", 1, "usage\n"),
        ("import os; os._exit(70)", 70, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit\n"),
        (
            "import threading, time\n"
            "def end():\n    time.sleep(0.1)\n    print('its thread')\n"
            "threading.Thread(target=end).start()",
            0,
            "its thread\n",
        ),
        ("import json\nclass A:\n  def __del__(_): print('freed')\njson.a = A()", 0, "freed\n"),
    ],
)
def test_the_exit_code_and_the_last_words_of_a_process(
    programs: Start, way: str, code: str, exit_code: int, told: str
) -> None:
    program = programs(way, code)
    assert program.wait() == exit_code
    assert not program.is_running
    assert program.log.endswith(told)
    assert bool(program.log) == bool(told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_ends_a_process(programs: Start, way: str, number: signal.Signals) -> None:
    program = programs(way, "import time; print('ready'); time.sleep(600)")
    await_text(program, "ready")
    assert program.is_running
    program.signal(number)
    assert program.wait() == -number
    program.signal(number)  # which nobody hears


def test_a_process_may_handle_an_interrupt(programs: Start, way: str) -> None:
    code = "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(5))\n"
    program = programs(way, f"{code}print('ready')\nsignal.pause()")
    await_text(program, "ready")
    program.signal(signal.SIGINT)
    assert program.wait() == 5


def test_a_process_that_does_not_end_is_complained_of(programs: Start, way: str) -> None:
    program = programs(way, "import time; time.sleep(600)")
    with pytest.raises(AssertionError, match=r"still runs after 0\.01 s"):
        program.wait(0.01)


@pytest.mark.parametrize("code", ["", "time.sleep(600)"], ids=["ended", "running"])
def test_the_children_of_a_process_end_with_it(programs: Start, way: str, code: str) -> None:
    # Given a process, ended or not, with a child that has its output elsewhere
    child = "child = subprocess.Popen(['sleep', '600']); print(f'child {child.pid}.')"
    program = programs(way, f"import subprocess, time\n{child}\n{code}")
    await_text(program, ".\n")
    if not code:
        assert program.wait() == 0
    child = psutil.Process(int(program.log.partition("child ")[2].partition(".")[0]))
    # When
    program.end()
    # Then
    assert not program.is_running
    wait_until(lambda: has_ended(child), "the child has ended")


def test_a_process_may_be_ended_at_once(programs: Start, way: str) -> None:
    program = programs(way, "import time; time.sleep(600)")
    program.end()
    assert program.wait() == -signal.SIGKILL


# --- The end of who started it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "state", "end"),
    [
        ("executed", "frozen", "killed"),
        ("forked", "frozen", "killed"),
        ("forked", "frozen", "ended"),
    ],
)
def test_nothing_outlives_the_process_that_started_it(
    tmp_path: Path, way: str, state: str, end: str
) -> None:
    # Given
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    command = [sys.executable, str(script), SLEEPING, str(tmp_path / "log"), way, state]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as starter:
        try:
            assert starter.stdin and starter.stdout
            assert starter.stdout.readline() == b"started\n"
            others = psutil.Process(starter.pid).children(recursive=True)
            # When
            if end == "ended":
                starter.stdin.close()
                assert starter.wait() == 0
        finally:
            starter.kill()
    # Then the process has ended, the server and the tracker of multiprocessing too
    assert len(others) == (1 if way == "executed" else 3)
    try:
        wait_until(lambda: all(map(has_ended, others)), f"{others} have ended")
    finally:
        for each in others:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended; who adopted it may not have asked for its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- A frozen one ---------------------------------------------------------------------------------


@pytest.fixture
def busy_machine() -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            stack.enter_context(busy())
        yield


@contextmanager
def busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("busy_machine")
def test_a_frozen_process_has_stopped_in_every_thread(programs: Start, way: str) -> None:
    """Where it had not, it went on to take a lock of SQLite, which nobody got until the thaw."""
    program = programs(way, WORKING)
    await_text(program, "ready")
    for _ in range(TIMES):
        assert not has_stopped(program.pid)
        # When
        program.freeze()
        # Then
        assert states_of_threads(program.pid) == ["T (stopped)"] * 7
        program.thaw()
        wait_until(lambda: not has_stopped(program.pid), "it goes on")


def states_of_threads(pid: int) -> list[str]:
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return [text.partition("State:")[2].splitlines()[0].strip() for text in texts]


def test_a_process_that_has_ended_may_be_frozen(programs: Start, way: str) -> None:
    program = programs(way, "")
    program.freeze()
    program.thaw()
    assert program.wait() == 0
