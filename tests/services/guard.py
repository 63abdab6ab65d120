"""The process between a test run and one server, so that no server outlives the run.

Run as a script (`python -I -S guard.py`), never imported. It reads one JSON line of instructions
and then one signal number per line from standard input, starts the server, and prints its pid.
The end of standard input means that the starting process is gone, SIGKILL included: the guard then
ends the server and removes its directory. It exits with the server's own exit code.

A pipe rather than PR_SET_PDEATHSIG on the server itself, because that signal fires when the
*thread* that started the server ends; here it only covers the death of the guard.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LAST_GRACE_SECONDS = 5


def die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(instructions: dict[str, Any]) -> "subprocess.Popen[bytes]":
    user = instructions["user"]
    identity: dict[str, Any] = {}
    if user is not None:
        identity = {"user": user[0], "group": user[1], "extra_groups": []}
    with Path(instructions["log"]).open("ab") as log:
        return subprocess.Popen(
            instructions["command"],
            cwd=instructions["directory"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_guard,
            **identity,
        )


def main() -> None:
    instructions = json.loads(sys.stdin.readline())
    try:
        server = start(instructions)
    except OSError as error:
        print(f"error {error}", flush=True)
        sys.exit(1)
    print(server.pid, flush=True)

    orphaned = threading.Event()

    def exit_with_server() -> None:
        code = server.wait()
        if not orphaned.is_set():
            os._exit(code if code >= 0 else 128 - code)

    threading.Thread(target=exit_with_server, daemon=True).start()
    for line in iter(sys.stdin.readline, ""):
        server.send_signal(int(line))

    orphaned.set()
    server.send_signal(instructions["last_signal"])
    try:
        server.wait(LAST_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    shutil.rmtree(instructions["directory"], ignore_errors=True)


if __name__ == "__main__":
    main()
