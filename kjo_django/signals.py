"""Signals: everything observable that happens to a job. Receivers observe, they never decide.

Sent with ``send_robust`` after the state they report is committed: a receiver that raises is
logged and changes nothing. ``sender`` is the name of the handler, the queue or the workflow.

=====================  ===========================================================================
signal                 keyword arguments
=====================  ===========================================================================
job_enqueued           job_id, unique_id, queue, handler
job_completed          job_id, unique_id, queue, handler, result, attempt, seconds
job_retried            job_id, unique_id, queue, handler, error, attempt, retry_at, seconds
job_failed             job_id, unique_id, queue, handler, error, attempt, reason
job_stalled            job_id, unique_id, queue, handler, attempt
job_cancelled          job_id, unique_id, queue, handler
job_requeued           job_id, unique_id, queue, handler
job_run_now            job_id, unique_id, queue, handler, actor
job_moved              job_id, unique_id, queue, handler, to_queue, actor
job_expiry_changed     job_id, unique_id, queue, handler, expires_at, actor
message_dead_lettered  dead_letter_id, queue, handler, reason, error
message_replayed       dead_letter_id, queue, handler
event_skipped          topic, event_type
message_processed      record, status, error
message_redelivered    record
message_redelivery_failed  record, error
message_killed         record
message_kill_failed    record, error
message_skipped        record
message_discarded      dead_letter_id, queue, handler, note
queue_paused           queue, actor
queue_resumed          queue, actor
queue_changed          queue, actor, changes
limit_changed          name, actor, changes
item_sent              item_id, topic, content_hash, message_type, batch_id
item_send_failed       item_id, topic, error, message_type, batch_id
workflow_completed     workflow_id, name, unique_id
workflow_failed        workflow_id, name, unique_id, state, reason
worker_started         worker_id
worker_stopped         worker_id
worker_asked           worker_id, asked_to, actor
=====================  ===========================================================================
"""

from __future__ import annotations

from typing import Any

from django import dispatch

from kjo_django.logs import get_logger

logger = get_logger("django.dispatch")


class Signal(dispatch.Signal):
    """A signal whose ``send_robust`` raises nothing, whatever ``LOGGING`` does with the record of a
    receiver that has raised, and whatever the receiver is: Django's asks for its
    ``__qualname__``, which instances do not have."""

    def _log_robust_failure(self, receiver: Any, err: Exception) -> None:
        name = getattr(receiver, "__qualname__", receiver)
        logger.error("Error calling %s in Signal.send_robust() (%s)", name, err, exc_info=err)


job_enqueued = Signal()
job_completed = Signal()
job_retried = Signal()
job_failed = Signal()
job_stalled = Signal()
job_cancelled = Signal()
job_requeued = Signal()
job_run_now = Signal()
job_moved = Signal()
job_expiry_changed = Signal()
message_dead_lettered = Signal()
message_replayed = Signal()
message_discarded = Signal()
event_skipped = Signal()
message_processed = Signal()
message_redelivered = Signal()
message_redelivery_failed = Signal()
message_killed = Signal()
message_kill_failed = Signal()
message_skipped = Signal()
queue_paused = Signal()
queue_resumed = Signal()
queue_changed = Signal()
limit_changed = Signal()
item_sent = Signal()
item_send_failed = Signal()
workflow_completed = Signal()
workflow_failed = Signal()
worker_started = Signal()
worker_stopped = Signal()
worker_asked = Signal()
