"""The servers of `tests.services`: reachable while wanted, gone afterwards, whatever happens."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services import (
    RedisServer,
    ServerFailed,
    Unprovisionable,
    apt,
    clients,
    fixtures,
    ports,
    provisioning,
    running,
)
from tests.services.ports import free_port, is_open
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.large  # starts servers, and is about the tests alone

ROOT = Path(__file__).parents[1]
VARIABLES = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")
RUN = [sys.executable, "-m", "tests.services", "run"]

TALK_TO_ALL_THREE = """
import os, time
import psycopg, redis
from confluent_kafka.admin import AdminClient, NewTopic

admin = AdminClient({"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]})
admin.create_topics([NewTopic("greetings", 2)])["greetings"].result(120)
deadline = time.monotonic() + 120
while "greetings" not in (topics := admin.list_topics(timeout=10).topics):
    assert time.monotonic() < deadline  # created is not yet told to every broker
    time.sleep(0.05)
print(len(topics["greetings"].partitions))
print(redis.Redis.from_url(os.environ["REDIS_URL"]).set("greeting", "hello"))
with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    print(connection.execute("SELECT 40 + 2").fetchone()[0])
    print(connection.execute("SHOW fsync").fetchone()[0])
"""

# Tells what it was given, then waits for a signal, or for the end of the test.
WAIT = """
import json, os, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
names = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")
print(json.dumps({name: os.environ[name] for name in names if name in os.environ}), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_server_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module", autouse=True)
def provisioned() -> None:
    fixtures.require(kafka=True, redis=True, postgres=True)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*RUN, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


@contextmanager
def waiting_command(
    *servers: str, argument: str = ""
) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """`run` around a command that waits, and the ports of its servers."""
    command = [*RUN, *servers, "--", sys.executable, "-c", WAIT, argument]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield process, [port_of(told[name]) for name in VARIABLES if name in told]
        finally:
            # The end of its input ends the command, even one whose parent is gone.
            process.kill()
            process.communicate()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's servers, and nobody else's, make their directories."""
    with tempfile.TemporaryDirectory() as directory:
        # Unlike tmp_path, open to the user that PostgreSQL runs as.
        Path(directory).chmod(0o755)
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.mark.large
def test_a_command_reaches_all_three_servers_and_they_are_gone_after_it() -> None:
    # When a command runs with no server chosen
    done = run("--", sys.executable, "-c", TALK_TO_ALL_THREE)

    # Then it talked to each with a real client
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "True", "42", "on"]

    # And none of the three announced servers listens any more
    announced = [line.split()[1] for line in done.stderr.splitlines() if " (ready in " in line]
    assert len(announced) == 3
    assert not any(is_open(port_of(url)) for url in announced)


def test_only_the_chosen_servers_run() -> None:
    with waiting_command("--redis", "--postgres") as (_, ports):
        assert len(ports) == 2
        assert all(map(is_open, ports))


@pytest.mark.parametrize(
    ("script", "code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_the_exit_code_is_that_of_the_command(script: str, code: int) -> None:
    assert run("--redis", "--", sys.executable, "-c", script).returncode == code


def test_a_command_that_does_not_exist_ends_as_in_a_shell() -> None:
    assert run("--redis", "--", "no-such-command").returncode == 127


def left_in(temporary: Path) -> list[Path]:
    """Return what servers have there. The file whose locks reserve ports is no server's."""
    return [path for path in temporary.iterdir() if not path.name.startswith("kjo-test-ports-")]


def test_an_interrupt_reaches_the_command_and_the_servers_stop_after_it(
    temporary: Path,
) -> None:
    with waiting_command() as (process, ports):
        assert all(map(is_open, ports))
        assert len(left_in(temporary)) == 3

        process.send_signal(signal.SIGINT)

        # The command's own handler chose this exit code.
        assert process.wait(PATIENCE) == 7
        assert not any(map(is_open, ports))
        assert not left_in(temporary)


def test_a_second_signal_forces_a_command_that_ignores_the_first() -> None:
    with waiting_command("--redis", argument="stubborn") as (process, ports):
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "not yet\n"

        process.send_signal(signal.SIGTERM)

        assert process.wait(PATIENCE) == 128 + signal.SIGKILL
        assert not any(map(is_open, ports))


def test_no_server_survives_the_kill_of_its_parent(temporary: Path) -> None:
    with waiting_command() as (process, ports):
        process.kill()
        process.wait()

        wait_until(lambda: not any(map(is_open, ports)))
        wait_until(lambda: not left_in(temporary))


@pytest.mark.medium
def test_a_given_server_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as given:
        monkeypatch.setenv("REDIS_URL", given.url)
        pid = given.pid

        with running(kafka=False, postgres=False) as environment:
            assert environment["REDIS_URL"] == given.url
        shown = run(
            "--redis", "--", sys.executable, "-c", "import os; print(os.environ['REDIS_URL'])"
        )

        assert shown.stdout.strip() == given.url
        assert given.is_running
        assert given.pid == pid


def test_a_server_that_cannot_start_shows_the_end_of_its_log() -> None:
    with RedisServer() as first:
        in_use = pytest.raises(ServerFailed, match="Address already in use")
        with in_use, RedisServer(port=first.port):
            pass
        assert first.is_running


def test_ports_are_out_of_reach_of_outgoing_connections() -> None:
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not ephemeral.exists():
        pytest.skip("the kernel does not tell its ephemeral ports")
    assert free_port() < int(ephemeral.read_text().split()[0])


@pytest.mark.medium
def test_a_port_that_another_process_was_given_is_not_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may take the server seconds to listen on it, as MariaDB, which makes its tables first."""
    # Given
    code = "import sys; from tests.services.ports import free_port as p; print(p(), flush=True)"
    given = [sys.executable, "-c", f"{code}; sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(given, **pipes) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        of_another, own, free = int(process.stdout.readline()), free_port(), free_port()
        ports._given.remove(free)
        drawn = iter([of_another, own, free])
        monkeypatch.setattr(ports._random, "randrange", lambda *ends: next(drawn))
        # When, then
        assert free_port() == free
        process.stdin.close()


class TestClients:
    """The programs of docs/clients, in a cache of the test's own."""

    @pytest.fixture(autouse=True)
    def copied_sources(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        fixtures.require(clients=["node"])  # so that its tools are there
        sources = tmp_path / "clients"
        shutil.copytree(clients.SOURCES, sources)
        monkeypatch.setattr(clients, "SOURCES", sources)
        monkeypatch.setenv("KJO_TEST_CACHE", str(tmp_path / "cache"))
        return sources

    def provision(self, language: str) -> None:
        provisioning.provision(kafka=False, redis=False, postgres=False, clients=[language])

    def test_they_are_built_anew_when_their_sources_have_changed(
        self, monkeypatch: pytest.MonkeyPatch, copied_sources: Path
    ) -> None:
        # Given a build that takes no time
        built: list[str] = []
        quick = dataclasses.replace(
            clients.CLIENTS["node"], build=lambda path: built.append(path.name)
        )
        monkeypatch.setitem(clients.CLIENTS, "node", quick)
        # When nothing has changed, then something they consist of, then what npm leaves there
        self.provision("node")
        self.provision("node")
        assert len(built) == 1
        with (copied_sources / "node" / "kjo.js").open("a") as file:
            file.write("// changed\n")
        self.provision("node")
        (copied_sources / "node" / "node_modules").mkdir()
        (copied_sources / "node" / "node_modules" / "left.js").touch()
        self.provision("node")
        # Then
        assert len(built) == 2

    def test_a_build_that_fails_leaves_nothing_and_says_why(self, copied_sources: Path) -> None:
        (copied_sources / "node" / "package.json").write_text("{")
        for _ in range(2):
            with pytest.raises(Unprovisionable, match=r"npm install[\s\S]*JSON"):
                self.provision("node")

    @pytest.mark.parametrize("tool", ["GO", "NODE", "NPM", "JAVAC"])
    def test_a_missing_toolchain_is_named(self, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
        program = getattr(provisioning, tool)
        missing = dataclasses.replace(program, find=lambda: None)
        monkeypatch.setattr(provisioning, tool, missing)
        monkeypatch.setattr("tests.services.apt.can_install", lambda: False)
        language = {"GO": "go", "JAVAC": "java"}.get(tool, "node")
        # On a developer's machine
        monkeypatch.delenv("CI", raising=False)
        with pytest.raises(pytest.skip.Exception) as skipped:
            fixtures.require(clients=[language])
        assert program.name in str(skipped.value)
        assert f"apt-get install {program.package}" in str(skipped.value)
        assert "Or name a server" not in str(skipped.value)
        # And in CI
        monkeypatch.setenv("CI", "true")
        with pytest.raises(Unprovisionable):
            fixtures.require(clients=[language])


def test_a_package_of_no_list_is_sought_among_the_backports_of_debian_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given a machine whose package lists are another distribution's
    nothing = subprocess.CompletedProcess([], 0, stdout="")
    monkeypatch.setattr("tests.services.apt.ran", lambda command, **options: nothing)
    # Then the package is in no list, and is looked for nowhere else
    assert not apt.has("valkey-server")
    with pytest.raises(Unprovisionable, match="no package lists of Debian"):
        apt.unpack(apt.BACKPORTS, ["valkey-server"], tmp_path / "valkey")
    assert list(tmp_path.iterdir()) == []


class TestUnprovisionableMachine:
    @pytest.fixture(autouse=True)
    def without_redis(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        missing = provisioning.Program("Redis 7", lambda: None, "redis-server", "REDIS_URL")
        monkeypatch.setattr(provisioning, "REDIS", missing)
        monkeypatch.setattr("tests.services.apt.can_install", lambda: False)
        monkeypatch.setenv("KJO_TEST_CACHE", str(tmp_path))

    def test_the_error_says_what_is_missing_and_how_to_get_it(self) -> None:
        with pytest.raises(Unprovisionable) as raised:
            provisioning.provision(kafka=False, postgres=False)
        for hint in ("Redis 7", "apt-get install redis-server", "REDIS_URL"):
            assert hint in str(raised.value)

    def test_tests_are_skipped_on_a_developers_machine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CI", raising=False)
        with pytest.raises(pytest.skip.Exception, match="Redis 7"):
            fixtures.require(redis=True)

    def test_tests_fail_in_ci(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CI", "true")
        with pytest.raises(Unprovisionable):
            fixtures.require(redis=True)
