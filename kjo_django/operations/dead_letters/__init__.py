"""Dead letters: finding, replaying and discarding them, from the table and from a topic."""

from kjo_django.operations.dead_letters.table import (
    PREVIEW_LIMIT,
    DeadLetterFilter,
    Mode,
    ReplayReport,
    Selection,
    count,
    discard,
    edit_and_replay,
    not_open,
    preview,
    processed,
    replay,
    restricted,
    select,
)

__all__ = [
    "PREVIEW_LIMIT",
    "DeadLetterFilter",
    "Mode",
    "ReplayReport",
    "Selection",
    "count",
    "discard",
    "edit_and_replay",
    "not_open",
    "preview",
    "processed",
    "replay",
    "restricted",
    "select",
]
