"""Running what prepares a server: programs that end by themselves."""

import subprocess
from collections.abc import Sequence
from typing import Any


def ran(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with nothing to read but ``input``; all it says is in ``stdout``.

    :param options: passed on to ``subprocess.run``.
    """
    return subprocess.run(
        command,
        **({} if "input" in options else {"stdin": subprocess.DEVNULL}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
