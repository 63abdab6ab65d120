"""Telling what was done to rows: to receivers of signals, and to the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from django.dispatch import Signal

from kjo_django import signals
from kjo_django.models import DeadLetter, Job

logger = logging.getLogger("kjo_django")


def tell_of_jobs(signal: Signal, jobs: Iterable[Job], **more: Any) -> None:
    """Send the signal for each of the jobs, and what else there is to say of all of them."""
    for job in jobs:
        signals.send(
            signal,
            sender=job.handler,
            job_id=str(job.pk),
            unique_id=job.unique_id,
            queue=job.queue,
            handler=job.handler,
            **more,
        )


def tell_of_letters(signal: Signal, letters: Iterable[DeadLetter], **more: Any) -> None:
    """The same for dead letters."""
    for letter in letters:
        signals.send(
            signal,
            sender=letter.handler,
            dead_letter_id=str(letter.pk),
            queue=letter.queue,
            handler=letter.handler,
            **more,
        )


def log_change(verb: str, count: int, actor: str) -> None:
    """Log how many jobs somebody changed, if any were."""
    if count:
        logger.info("%s %d jobs%s", verb, count, f" for {actor}" if actor else "")
