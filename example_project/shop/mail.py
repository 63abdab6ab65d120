"""A mail backend that needs no mail server, and misbehaves as one does under load."""

from __future__ import annotations

import re
import smtplib
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from django.conf import settings
from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend


class SimulatedGateway(BaseEmailBackend):
    """SIMULATION: writes each mail to a file of its own, but refuses every Nth one once.

    The refusal is what a busy SMTP server answers, so the retries of the demo are real ones.
    Settings: ``EMAIL_FILE_PATH``, the folder; ``SHOP_GATEWAY_REFUSES_EVERY``, the N, 0 for none.
    """

    _lock = threading.Lock()
    _seen = 0
    _refused: set[str] = set()

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Write the mails; the number written is returned, as Django asks for."""
        for message in email_messages:
            self._admit(message.extra_headers.get("X-Idempotency-Key", ""))
            self._write(message)
        return len(email_messages)

    @classmethod
    def _admit(cls, key: str) -> None:
        every = settings.SHOP_GATEWAY_REFUSES_EVERY
        with cls._lock:
            if key in cls._refused:
                cls._refused.remove(key)
                return
            cls._seen += 1
            if every and cls._seen % every == 0:
                cls._refused.add(key)
                raise smtplib.SMTPDataError(451, "4.7.1 Too many messages, try again later")

    @staticmethod
    def _write(message: EmailMessage) -> None:
        # A second file for a mail that was sent twice: duplicates are to be seen, not overwritten.
        name = re.sub(r"[^A-Za-z0-9-]", "_", message.extra_headers.get("X-Order", "mail"))
        folder = Path(settings.EMAIL_FILE_PATH) / name.partition("-")[0]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name}-{uuid.uuid4().hex}.eml"
        file.write_bytes(message.message().as_bytes())
