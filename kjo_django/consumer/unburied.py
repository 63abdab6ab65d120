"""Deaths whose dead letters their topics refused: kept, so that nobody dies again for it."""

from __future__ import annotations

from collections.abc import Sequence

from kjo_django.consumer.work import Delivery, Outcome

MOST = 1000
"""Deaths kept; of more, those before die again."""


class Unburied:
    """Outcomes by their delivery, which comes up again. Of a worker; any lane may ask."""

    def __init__(self) -> None:
        self._outcomes: dict[Delivery, Outcome] = {}

    def keep(self, outcomes: Sequence[Outcome]) -> None:
        """Keep these; to be called with those that were refused."""
        if len(self._outcomes) >= MOST:  # partitions may have gone elsewhere with theirs
            self._outcomes.clear()
        self._outcomes.update((outcome.delivery, outcome) for outcome in outcomes)

    def holds_any(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether one of these is dead already."""
        return bool(self._outcomes) and not self._outcomes.keys().isdisjoint(deliveries)

    def take(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Return how those of these that are dead ended, and keep them no longer."""
        found = (self._outcomes.pop(delivery, None) for delivery in deliveries)
        return [outcome for outcome in found if outcome is not None]
