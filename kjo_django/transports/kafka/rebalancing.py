"""Rebalances: partitions are assigned, revoked, or lost.

The client calls back inside ``poll``, ``consume`` and ``close``, so in the thread that polls; by
way of `Callbacks.guard`, since none of this may raise there.
"""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.transports.base import AssignedCallback, RevokedCallback, TopicPartition
from kjo_django.transports.kafka.committing import Committer
from kjo_django.transports.kafka.health import Health
from kjo_django.transports.kafka.reading import Reader, Reading
from kjo_django.transports.watermark import Watermark


class Rebalancing:
    """Begins and ends the epochs of a subscription's partitions.

    A partition is in the watermark and in the readers for the same epochs: an assignment enters it
    in both, and `retire` takes it out of both. Under the cooperative protocol each call names only
    the partitions that move, under an eager one all.
    """

    def __init__(
        self,
        watermark: Watermark,
        reading: Reading,
        committer: Committer,
        health: Health,
        on_revoked: RevokedCallback | None,
        on_assigned: AssignedCallback | None,
    ) -> None:
        self._watermark = watermark
        self._reading = reading
        self._committer = committer
        self._health = health
        self._user_on_revoked = on_revoked
        self._user_on_assigned = on_assigned

    def on_assign(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """Begin an epoch of each; reading starts at the committed offset, where the client is."""
        assigned = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._committer.forget(assigned)
        for partition in assigned:
            self._reading.assign(self._watermark.assign(partition))
        self._reading.unsteady = True
        self._health.check_soon()
        if assigned and self._user_on_assigned is not None:
            self._user_on_assigned(assigned)

    def on_revoke(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """Commit what is settled once the user's callback has waited for it, then end the epochs.

        They are still ours until this returns, so the commit is accepted.
        """
        readers = self._reading.find(partitions)
        try:
            self._tell_revoked(readers, lost=False)
        finally:
            revoked = [reader.partition for reader in readers]
            try:
                self._committer.now(consumer, self._watermark.positions(revoked))
            finally:
                # The client remembers a pause beyond the assignment; we remember it ourselves.
                paused = [reader.at_position() for reader in readers if reader.client_paused]
                self.retire(readers)
                if paused:
                    consumer.resume(paused)

    def on_lost(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """End the epochs and commit nothing."""
        readers = self._reading.find(partitions)
        # Another consumer may own them: nothing that still arrives may move a watermark.
        self.retire(readers)
        self._tell_revoked(readers, lost=True)

    def retire(self, readers: Sequence[Reader]) -> None:
        """End the epoch of these partitions: results that still come are dropped."""
        partitions = [reader.partition for reader in readers]
        self._watermark.revoke(partitions)
        self._committer.forget(partitions)
        self._reading.retire(readers)

    def _tell_revoked(self, readers: Sequence[Reader], *, lost: bool) -> None:
        if readers and self._user_on_revoked is not None:
            self._user_on_revoked([reader.partition for reader in readers], lost)
