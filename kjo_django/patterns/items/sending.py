"""One run of a template producer: what to send, claimed, sent, marked."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db import transaction

from kjo_django import signals
from kjo_django.backends import get_coordination, get_transport, transport_class
from kjo_django.coordination.base import Claim
from kjo_django.enqueue.dispatch import publish
from kjo_django.enqueue.wakeups import topic_channel, wake
from kjo_django.exceptions import (
    CoordinationError,
    KjoError,
    PayloadError,
    PublishError,
    text_of,
)
from kjo_django.messages.serializers import one_line, storable_text
from kjo_django.patterns.items.producer import (
    AbstractProducer,
    ProduceResult,
    claim_name,
    hash_name,
    sent_name,
)
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import OutgoingRecord, Published

logger = logging.getLogger("kjo_django.producer")

T = TypeVar("T")

UNSENDABLE_PER_ITEM = 10
LEAST_UNSENDABLE = 1_000
"""Items of a run that can never be sent: ten for each it may send, and at least a thousand. They
do not count against its limit, and it reads on behind them; but it does not read all of a table."""


@dataclass(slots=True, eq=False)
class _Candidate:
    """An item that may be sent."""

    item: Any
    id: str
    hash: str
    record: OutgoingRecord | None = None


class Sending:
    """See the module. Its batch id is also the token of its claims."""

    def __init__(self, producer: AbstractProducer, limit: int, message_type: str) -> None:
        self._producer = producer
        self._options = producer.options
        self._target = producer.target
        self._limit = limit
        self._type = message_type
        self._batch_id = secrets.token_hex(8)
        self._hashes: set[str] = set()
        self._sent: list[str] = []
        self._total = self._failed = self._unsendable = 0
        self._skips: Counter[str] = Counter()
        self._reason: str | None = None

    def run(self, criteria: dict[str, Any]) -> ProduceResult:
        """Look at window after window until the limit is reached or nothing is left."""
        excluded: set[str] = self._ask(self._producer.get_processing_ids, set())
        for window in self._producer.windows(criteria, self._limit, excluded):
            candidates = self._unsent(self._read(window))
            while candidates and self._room > 0:
                size = min(self._room, self._options.batch_size)
                self._send(candidates[:size])
                del candidates[:size]
            if self._room <= 0:
                break
        if not self._total:
            self._reason = "no items"
        elif self._reason is None and self._skips:
            self._reason = "; ".join(f"{n:,} skipped: {why}" for why, n in self._skips.items())
        result = ProduceResult(
            self._batch_id,
            self._total,
            len(self._sent),
            self._skips.total(),
            self._failed,
            self._sent,
            self._reason,
        )
        logger.info("Sent %d of %d items to %s", result.sent, result.total, self._target.topic)
        return result

    @property
    def _room(self) -> int:
        """How many more items may be tried."""
        if self._unsendable >= max(UNSENDABLE_PER_ITEM * self._limit, LEAST_UNSENDABLE):
            return 0
        return self._limit - len(self._sent) - (self._failed - self._unsendable)

    # --- What to send -----------------------------------------------------------------------------

    def _read(self, window: Iterable[Any]) -> Iterator[_Candidate]:
        seen: set[str] = set()
        for item in window:
            item_id = str(self._producer.get_item_id(item))
            if item_id in seen:
                continue  # a join returns a row for each match
            seen.add(item_id)
            try:
                if storable_text(item_id) != item_id:
                    raise PayloadError("Its id holds a character no database keeps")
                yield _Candidate(item, item_id, self._producer.message_hash(item))
            except Exception as error:
                # One item that cannot be written down must not keep the others from going out.
                self._total += 1
                self._fail(item_id, error, is_final=True)

    def _unsent(self, read: Iterator[_Candidate]) -> list[_Candidate]:
        """Drop what was sent recently with the same content, seen by one bulk look (KJO-F3)."""
        window = list(read)
        nothing: dict[str, str] = {}
        hashes = self._ask(lambda: self._producer.get_sent_hashes([c.id for c in window]), nothing)
        unsent = []
        for candidate in window:
            if hashes.get(candidate.id) == candidate.hash:
                seconds = self._target.sent_ttl.total_seconds()
                self._skip(candidate, f"this content was sent less than {seconds:g} s ago")
            else:
                unsent.append(candidate)
        return unsent

    def _skip(self, candidate: _Candidate, why: str) -> None:
        self._total += 1
        self._skips[why] += 1
        logger.debug(
            "Skipping duplicate message of %s: %s",
            self._producer.get_item_key(candidate.item),
            why,
        )

    # --- Sending ----------------------------------------------------------------------------------

    def _send(self, candidates: Sequence[_Candidate]) -> None:
        """Claim, look again, send, mark, let go."""
        claimed = self._claim(candidates)
        try:
            # Another producer may have sent some between our first look and our claim (KJO-F2).
            ready = self._new_content(self._unsent(iter(claimed)))
            self._publish(ready)
        finally:
            self._release([claim_name(self._target, c.id) for c in claimed])

    def _claim(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        names = [claim_name(self._target, c.id) for c in candidates]
        taken = self._taken(names)
        claimed = []
        for candidate, name in zip(candidates, names, strict=True):
            if name in taken:
                self._skip(candidate, "another producer is sending this item")
            else:
                claimed.append(candidate)
        return claimed

    def _taken(self, names: list[str]) -> set[str]:
        """Claim all names; return those another run holds."""
        ttl, unproven = self._options.claim_ttl, [Claim(True, 1)] * len(names)
        claims = self._ask(lambda: get_coordination().claim(names, self._batch_id, ttl), unproven)
        return {name for name, claim in zip(names, claims, strict=True) if not claim.acquired}

    def _new_content(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Drop content that was sent under another id, where that is asked for (KJO-F6)."""
        if not self._options.dedup_across_ids:
            return candidates
        first: dict[str, _Candidate] = {}
        for candidate in candidates:
            if candidate.hash in self._hashes or candidate.hash in first:
                self._skip(candidate, "this content was sent under another id")
            else:
                first[candidate.hash] = candidate
        taken = self._taken([hash_name(self._target, hash) for hash in first])
        fresh = []
        for candidate in first.values():
            if hash_name(self._target, candidate.hash) in taken:
                self._skip(candidate, "this content was sent under another id")
            else:
                fresh.append(candidate)
        return fresh

    def _publish(self, candidates: Iterable[_Candidate]) -> None:
        built = []
        for candidate in candidates:
            self._total += 1
            try:
                candidate.record = self._producer.build_message(
                    candidate.item, self._type, candidate.hash
                )
            except Exception as error:
                self._fail(candidate.id, error, is_final=True)
                self._forget_content([candidate])
            else:
                built.append(candidate)
        if not built:
            return
        answers = self._hand_over([c.record for c in built if c.record is not None])
        pairs = list(zip(built, answers, strict=True))
        self._note_sent([c for c, answer in pairs if answer.error is None])
        refused = [(c, answer) for c, answer in pairs if answer.error is not None]
        self._forget_content([c for c, _ in refused])
        for candidate, answer in refused:
            self._fail(candidate.id, PublishError(answer.error), is_final=answer.is_final)

    def _hand_over(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Publish; that nothing could be tried is an answer for each record too."""
        transport = get_transport(self._target.transport)
        try:
            if not transport_class(self._target.transport).capabilities.transactional:
                return publish(transport, records)
            # Committed before they are marked as sent: inside somebody's transaction they might
            # never be. Durable makes Django refuse that.
            with transaction.atomic(using=jobs_database(), durable=True):
                answers = publish(transport, records)
        except PublishError as error:
            return [Published(error=str(error)) for _ in records]
        wake(topic_channel(self._target.topic))
        return answers

    def _note_sent(self, sent: Sequence[_Candidate]) -> None:
        """Mark what the transport has, then tell."""
        marks = {sent_name(self._target, c.id): c.hash for c in sent}
        try:
            get_coordination().set_marks(marks, self._target.sent_ttl)
            if self._options.dedup_across_ids:
                names = [hash_name(self._target, c.hash) for c in sent]
                get_coordination().renew(names, self._batch_id, self._target.sent_ttl)
        except CoordinationError as error:
            # They are on their way; not knowing that costs duplicates, which consumers absorb.
            logger.error("%d items were sent and could not be marked: %s", len(sent), error)
            self._reason = self._reason or str(error)
        self._hashes.update(c.hash for c in sent)
        for candidate in sent:
            self._sent.append(candidate.id)
            self._tell(lambda c=candidate: self._producer.on_success(c.id))  # type: ignore[misc]
            signals.send(
                signals.item_sent,
                sender=type(self._producer).__name__,
                item_id=candidate.id,
                topic=self._target.topic,
                content_hash=candidate.hash,
                message_type=self._type,
                batch_id=self._batch_id,
            )

    def _fail(self, item_id: str, error: Exception, *, is_final: bool) -> None:
        """Count and tell of an item that was not sent.

        :param is_final: the same would come of trying again, however often.
        """
        self._failed += 1
        self._unsendable += is_final
        self._reason = self._reason or text_of(error)
        logger.error("Item %s was not sent: %s", one_line(item_id), one_line(text_of(error)))
        self._tell(lambda: self._producer.on_failed(item_id, error))
        signals.send(
            signals.item_send_failed,
            sender=type(self._producer).__name__,
            item_id=item_id,
            topic=self._target.topic,
            error=error,
            message_type=self._type,
            batch_id=self._batch_id,
        )

    def _tell(self, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception:
            # The record is out, or is not: a hook changes neither.
            logger.exception("A hook of %s failed", type(self._producer).__name__)

    # --- Coordination -----------------------------------------------------------------------------

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Ask coordination; when it is away, obey ``without_coordination``."""
        try:
            return question()
        except CoordinationError as error:
            if self._options.without_coordination == "stop":
                raise
            logger.warning("Sending without de-duplication: %s", error)
            return otherwise

    def _forget_content(self, candidates: Sequence[_Candidate]) -> None:
        if self._options.dedup_across_ids and candidates:
            self._release([hash_name(self._target, c.hash) for c in candidates])

    def _release(self, names: list[str]) -> None:
        try:
            if names:
                get_coordination().release(names, self._batch_id)
        except KjoError as error:
            logger.warning("Claims not released, they expire by themselves: %s", error)
