"""Whether each key kept its order."""

from __future__ import annotations

from collections import defaultdict

from tests.acceptance.engine import Engine


def assert_order(engine: Engine) -> None:
    """The ledger's entries are in the order of their jobs' names, key by key."""
    by_key: dict[str, list[str]] = defaultdict(list)
    for key, name in engine.entries.order_by("id").values_list("note", "job"):
        by_key[key].append(name)
    wrong = {key: names for key, names in by_key.items() if names != sorted(names)}
    assert not wrong, f"{len(wrong)} keys out of order, such as {next(iter(wrong.items()))}"
