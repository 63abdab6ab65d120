"""An engine whose processes know the consumer of `tests.items`, with the key names of seed 1."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from django.test import override_settings

from kjo_django.conf import get_settings
from kjo_django.runtime import close_backends, get_transport
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.program import Program
from tests.items.models import Item, Run


class ItemEngine(Engine):
    """Use as `Engine`; its queue is `items`, and names in Redis carry no prefix but its own."""

    def __init__(self, servers: Servers, logs: Path, options: dict[str, Any] | None = None) -> None:
        super().__init__(servers, logs, options)
        self.calls_file = logs / "calls"
        self.calls_file.touch()
        self.prefix = f"ITEM{self._suffix}"
        self.more: dict[str, str] = {}

    def _kjo(self) -> dict[str, Any]:
        kjo = super()._kjo()
        kjo["QUEUES"]["items"] = {
            "topic": f"items-{self._suffix}",
            "consumer_group": f"items-{self._suffix}",
            "key_prefix": self.prefix,
            **self._options.get("QUEUES", {}).get("items", {}),
        }
        if self.servers.redis:
            kjo["COORDINATION"]["OPTIONS"] = {"CACHE": "default"}
        return kjo

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "KJO_TEST_ITEMS": str(self.calls_file), **self.more}

    def __enter__(self) -> ItemEngine:
        super().__enter__()
        # Producers of this process write where the engine's processes read.
        self._routers = override_settings(DATABASE_ROUTERS=[ToEngine()])
        self._routers.enable()
        return self

    def __exit__(self, *error: object) -> None:
        self._routers.disable()
        close_backends()
        super().__exit__(*error)

    # --- Doing ------------------------------------------------------------------------------------

    def fill(self, count: int, **fields: Any) -> list[str]:
        """Store items and return their ids."""
        rows = [Item(email=f"{n}@example.com", **fields) for n in range(count)]
        made = Item.objects.using(ALIAS).bulk_create(rows, batch_size=2000)
        return [str(item.pk) for item in made]

    def produce(self, *arguments: str) -> Program:
        """Start a producer process."""
        return self.manage("kjo_produce", "tests.items.producers.ItemProducer", *arguments)

    def consume(self, *arguments: str) -> Program:
        """Start a worker of the items."""
        return self.manage("kjo_consume", "items", "--status-interval", "0", *arguments)

    def ready_consumer(self, *arguments: str) -> Program:
        worker = self.consume(*arguments)
        self.wait_until(lambda: bool(self.partitions_of(worker.pid)), f"{worker} has no partition")
        return worker

    # --- Looking ----------------------------------------------------------------------------------

    @property
    def items(self) -> Any:
        return Item.objects.using(ALIAS)

    def runs(self) -> Counter[str]:
        """Committed runs of each item."""
        return Counter(Run.objects.using(ALIAS).values_list("item", flat=True))

    def calls(self, word: str = "process") -> list[list[str]]:
        """The lines consumers wrote: time, pid, word, item …"""
        lines = (line.split() for line in self.calls_file.read_text().splitlines())
        return [line for line in lines if line[2] == word]

    def lag_of_items(self) -> int:
        queue = get_settings().queue("items")
        return sum(get_transport().lag([queue.topic], queue.consumer_group).values())

    def all_in_state(self, state: int) -> bool:
        return not self.items.exclude(state=state).exists()


class ToEngine:
    """Everything lives in the engine's database."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return ALIAS

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return ALIAS
