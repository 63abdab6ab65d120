"""Which job rows a group of deliveries needs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kjo_django.engine.attempt import Delivery
from kjo_django.models import EventKey
from kjo_django.runtime import Runtime
from kjo_django.store import Store
from kjo_django.store.rows import JobRow


def row_id(delivery: Delivery, service: str) -> str:
    """Return the key of its row in what ``load_rows`` returns.

    :param service: this one's name. What others call their jobs is not looked for among ours.
    """
    message = delivery.message
    assert message is not None
    if message.job_id is not None and message.service == service:
        return message.job_id
    return f"unique:{message.row_name}"


def load_rows(runtime: Runtime, deliveries: Sequence[Delivery], *, lock: bool) -> dict[str, JobRow]:
    """Return the job rows of a group in one query (two when foreign messages are among them)."""
    wanted = _Wanted(deliveries, runtime.service)
    found = runtime.store.job_rows(wanted.ids, lock=lock) if wanted.ids else {}
    return found | wanted.of_foreign(runtime.store)


def mark_and_load(
    runtime: Runtime, keys: Sequence[EventKey], deliveries: Sequence[Delivery]
) -> tuple[set[EventKey], dict[str, JobRow]]:
    """Insert a group's markers, then lock and return its rows; return which keys were new, too."""
    wanted = _Wanted(deliveries, runtime.service)
    fresh, found = runtime.store.insert_markers_and_lock(keys, wanted.ids)
    return fresh, found | wanted.of_foreign(runtime.store)


class _Wanted:
    """Whose rows a group needs."""

    __slots__ = ("_foreign", "_named", "_queue", "ids")

    def __init__(self, deliveries: Sequence[Delivery], service: str) -> None:
        self.ids: list[str] = []
        # Another service's job has no row here, but for the one its first failure bore.
        self._foreign: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._queue = deliveries[0].queue.retries
        for delivery in deliveries:
            message = delivery.message
            assert message is not None
            id = message.job_id
            if id is None or message.service != service:
                place = self._foreign[message.row_name] = row_id(delivery, service)
                if not message.unique_id and (named := _IS_NAMED(message.id)):
                    self._named[named[1]] = place
            elif _IS_ID(id):
                self.ids.append(id)

    def of_foreign(self, store: Store) -> dict[str, JobRow]:
        """Return the rows of foreign messages: those their first failures bore, else the open jobs
        of this service whose ids they bear."""
        if not self._foreign:
            return {}
        of_failures, named = store.rows_of_foreign(self._queue, self._foreign, self._named)
        return {self._named[id]: row for id, row in named.items()} | {
            self._foreign[name]: row for name, row in of_failures.items()
        }


_ID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_IS_ID = re.compile(_ID).fullmatch
"""As we write them; whoever writes them otherwise has no row here."""
_IS_NAMED = re.compile(rf"({_ID})(?::\d+)?").fullmatch
"""As the messages of our jobs are named."""
