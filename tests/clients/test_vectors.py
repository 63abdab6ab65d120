"""Programs in other languages read and write the protocol's vectors as this package does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.clients.conftest import run
from tests.services.clients import command_of

VECTORS = Path(__file__).parents[2] / "docs" / "reference" / "protocol"
KINDS = ("job", "dead-letter", "replay", "event", "kdlq")
SENT_BY_OTHERS = 3
"""Vectors of jobs that a service sends which stores none."""


def expected_counts() -> dict[str, tuple[int, int]]:
    """Return how many vectors of each kind are read and written."""
    counts = {}
    for kind in KINDS:
        vectors = json.loads((VECTORS / f"{kind}.vectors.json").read_text())["vectors"]
        given = sum("given" in vector for vector in vectors)
        written = {"job": SENT_BY_OTHERS, "event": given, "kdlq": given}.get(kind, 0)
        counts[kind] = (sum(vector["record"] is not None for vector in vectors), written)
    return counts


def test_every_vector_is_read_and_written(language: str) -> None:
    printed = run(language, "vectors", str(VECTORS))
    # Then nothing differed, and nothing was left out
    found = re.findall(r"^(\S+): (\d+) read, (\d+) written$", printed, re.MULTILINE)
    assert {kind: (int(read), int(written)) for kind, read, written in found} == expected_counts()


WRONG = {
    "job: the second attempt of the third generation, read": ('"attempt": 2', '"attempt": 3'),
    "job: of another service: the least there is, written": (r"order\":7", r"order\":8"),
    "event: no id, read": ('"invalid"', '"too_large"'),
    "event: versions are normalised, written": ('"key": "u7"', '"key": "u8"'),
    "kdlq: the first redelivery, status": ('"REDELIVERED"', '"ROUTED_TO_DLQ"'),
    "kdlq: killed without an error, written": ('"AAAAAQ=="', '"AAAAAg=="'),
    "dead-letter: a job, read": ('"id": "0197', '"id": "0198'),
    "replay: a message of another service, read": ('"id": "', '"id": "x'),
}
"""What differs once a text of a vector is another one."""


def test_vectors_that_differ_are_named(language: str, tmp_path: Path) -> None:
    # Given vectors of which some are wrong
    directory = tmp_path / "vectors"
    shutil.copytree(VECTORS, directory)
    for what, (before, after) in WRONG.items():
        kind, _, name = what.rpartition(", ")[0].partition(": ")
        file = directory / f"{kind}.vectors.json"
        start, marker, rest = file.read_text().partition(f'"name": "{name}"')
        vector, end, others = rest.partition('\n   "conforms"')
        assert before in vector, what
        file.write_text("".join([start, marker, vector.replace(before, after), end, others]))
    # When
    done = subprocess.run(
        command_of(language, "vectors", str(directory)), capture_output=True, text=True, timeout=60
    )
    # Then
    assert done.returncode == 1
    named = {line.removesuffix(":") for line in done.stdout.splitlines() if line.endswith(":")}
    assert named >= WRONG.keys()
