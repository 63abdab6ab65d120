"""What the one pipeline runs for a template consumer.

    lease CONS:PREFIX:id ──> is_item_completed? ──yes──> skipped
                                   │ no
            one transaction:  process ─> mark_item_as_completed ─> handle_processing_result
                                   │ raised
            attempts left:  the item stays as it is, its job is due again later
            none left:      mark_item_as_failed, in the transaction of the dead letter

``on_success`` and ``on_failed`` are called afterwards; what they raise is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync
from django.db import transaction

from kjo_django.engine.attempt import Outcome, Result
from kjo_django.engine.handler.context import JobContext, facts_of
from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names
from kjo_django.models import Job
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.store.transactions import jobs_database

if TYPE_CHECKING:
    from kjo_django.patterns.items.consumer import AbstractConsumer

logger = logging.getLogger("kjo_django.consumer")

SKIPPED_COMPLETED = "completed"
"""``Outcome.reason`` of a message whose item was completed before (KJO-63)."""


class ItemHandler(Handler):
    """One per consumer class; its consumer is made with the first message."""

    judges_itself = True
    observes = True

    def __init__(
        self, make: Callable[[], AbstractConsumer], kind: type[Any], options: HandlerOptions
    ) -> None:
        def run(context: JobContext, message: dict[str, Any]) -> None:
            self.run(context, message)

        # Two classes of one name are told apart by this.
        run.__module__, run.__qualname__ = kind.__module__, kind.__qualname__
        super().__init__(run, options)
        self._make = make
        self._consumer: AbstractConsumer | None = None
        self._lock = threading.Lock()
        self._completed_before: set[str] = set()

    @property
    def consumer(self) -> AbstractConsumer:
        """The consumer whose methods are called, from every lane's thread."""
        with self._lock:
            if self._consumer is None:
                self._consumer = self._make()
            return self._consumer

    def use(self, consumer: AbstractConsumer) -> None:
        """Call the methods of this one."""
        with self._lock:
            self._consumer = consumer

    def item_id_of(self, message: dict[str, Any]) -> str:
        """Return the id of the item a message is about."""
        found = _call(self.consumer.get_message_id, message)
        if found is None:
            raise ValueError("get_message_id returned None")
        return str(found)

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand the message over as it is."""
        if not isinstance(value, dict):
            raise MessageError(
                "invalid", f"The message must be an object, not {type(value).__name__}"
            )
        return (value,), {}

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Return None: ``process`` takes any message."""
        return None

    # --- One run ----------------------------------------------------------------------------------

    def run(self, context: JobContext, message: dict[str, Any]) -> None:
        """Process the item unless it is completed; called under its lease."""
        consumer, item_id = self.consumer, self.item_id_of(message)
        self._completed_before.discard(context.idempotency_key)
        key = _call(consumer.get_message_key, message)
        if _call(consumer.is_item_completed, item_id):
            logger.info("Nothing to do, completed already or gone: %s", key)
            self._completed_before.add(context.idempotency_key)
        elif self.options.atomic:
            logger.debug("New item to process: %s", key)
            with self._transaction(is_open=True):
                self._complete(item_id, _call(consumer.process, message))
        else:
            logger.debug("New item to process: %s", key)
            result = _call(consumer.process, message)
            with self._transaction(is_open=False):
                # A worker that was frozen past its lease comes late: the item is somebody else's.
                if not _call(consumer.is_item_completed, item_id):
                    self._complete(item_id, result)
        if job_id := context.headers.get(names.JOB_ID):
            _free_identity(job_id)

    def _complete(self, item_id: str, result: Any) -> None:
        _call(self.consumer.mark_item_as_completed, item_id)
        if result is not None:  # 0, "", False and [] are results too (KJO-F13)
            _call(self.consumer.handle_processing_result, item_id, result)

    def _transaction(self, *, is_open: bool) -> AbstractContextManager[Any]:
        """Return the transaction the item is completed in: the pipeline's, where it is open and on
        the item's database, else one of its own."""
        alias = self.consumer.get_database()
        if is_open and alias == jobs_database():
            return nullcontext()
        return transaction.atomic(using=alias)

    # --- Afterwards -------------------------------------------------------------------------------

    def on_failure(self, outcome: Outcome) -> None:
        """Mark the item as failed once no attempt is left (KJO-F15)."""
        message = outcome.delivery.message
        if outcome.result is not Result.DEAD or message is None:
            return
        if outcome.job is not None:
            _free_identity(outcome.job.id)
        try:
            with transaction.atomic(using=self.consumer.get_database()):
                _call(self.consumer.mark_item_as_failed, message.lease_id)
        except Exception:
            # The dead letter is written all the same, and the item found again by its producer.
            facts = facts_of(outcome.delivery, outcome.attempt)
            logger.exception("Item %s could not be marked as failed", message.lease_id, extra=facts)

    def on_settled(self, outcome: Outcome) -> None:
        """Call the hooks; everything is committed."""
        message = outcome.delivery.message
        if message is None:
            return
        if outcome.result is Result.COMPLETED:
            was_before = message.id in self._completed_before
            self._completed_before.discard(message.id)
            if was_before and not outcome.is_confirmed:
                outcome.result, outcome.reason = Result.SKIPPED, SKIPPED_COMPLETED
            else:
                _call(self.consumer.on_success, message.lease_id)
        elif outcome.result is Result.DEAD:
            _call(self.consumer.on_failed, message.lease_id, outcome.error)


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a consumer, whether it is ``async def`` or not."""
    found = method(*arguments)
    if hasattr(found, "__await__"):
        return async_to_sync(_await)(found)
    return found


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _free_identity(job_id: Any) -> None:
    """Let the job of an item's retries go: the same content, sent again once the item was set back
    or has failed, is a new piece of work and not a copy of this one (KJO-70)."""
    Job.objects.using(jobs_database()).filter(pk=job_id).update(unique_id=None)
