"""Who writes the attributes of a delivery: each has an owner, whom others ask."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import kjo_django
from kjo_django.limits.permits import LimitState

pytestmark = pytest.mark.small  # reads files

ROOT = Path(kjo_django.__file__).parent
LIMITS = {"limits/limiter.py", "limits/permits.py"}
SCHEDULER = {"engine/scheduler.py"}
PIPELINE = {"engine/group.py"}
WRITERS = {
    **{field.name: LIMITS for field in dataclasses.fields(LimitState)},
    **dict.fromkeys(("limit_state",), LIMITS),
    **dict.fromkeys(("put_off_until", "waiting_since", "weight"), SCHEDULER),
    **dict.fromkeys(("is_orphan", "is_settled", "took"), PIPELINE),
    "was_joined": PIPELINE | {"engine/direct_steps.py"},
    "paused_since": {"engine/failures.py"},
    "trace": {"contrib/opentelemetry/tracer.py"},
}


def written(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the attributes that code writes of other objects than its own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.attr


def test_an_attribute_of_a_delivery_is_written_by_its_owner_alone() -> None:
    writers: defaultdict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for name in written(ast.parse(path.read_text())):
            writers[name].add(str(path.relative_to(ROOT)))
    others = {name: writers[name] - owners for name, owners in WRITERS.items()}
    assert {name: found for name, found in others.items() if found} == {}


def test_what_is_written_is_found() -> None:
    code = "self.a = 1\nb.c = 2\nd[0].e += 3\nf.g, h.i = 4, 5\nprint(j.k)"
    assert list(written(ast.parse(code))) == ["c", "e", "g", "i"]
