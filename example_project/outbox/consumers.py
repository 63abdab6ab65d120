"""Where the emails go."""

from __future__ import annotations

import smtplib
from typing import Any

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from example_project.outbox.models import Email
from kjo_django import ModelConsumer, PermanentError
from kjo_django.exceptions import RateLimitExceededError


class EmailConsumer(ModelConsumer):
    """Sends one email at a time to the mail server, as fast as that server likes."""

    queue = "outbox"
    topic = "email-queue"
    consumer_group = "email-processors"
    key_prefix = "EMAIL"
    model = Email
    key_field = "recipient"
    completed_at_field = "sent_at"
    max_concurrency = 3
    # A mail server may take its time: no transaction stays open meanwhile. Where a worker dies
    # between the server's answer and the commit, the email goes out again with the same Message-ID.
    atomic = False

    def process(self, message: dict[str, Any]) -> dict[str, str]:
        """Send it; a server that is busy pauses the partition, one that refuses ends the matter."""
        data, message_id = message["data"], f"<outbox-{message['id']}@example.com>"
        email = EmailMessage(
            data["subject"],
            data["body"],
            to=[data["recipient"]],
            headers={"Message-ID": message_id, "X-Order": f"outbox-{message['id']}"},
            connection=connection(),
        )
        try:
            email.send()
        except smtplib.SMTPRecipientsRefused as error:
            raise verdict(*next(iter(error.recipients.values()))) from error
        except smtplib.SMTPResponseException as error:
            raise verdict(error.smtp_code, error.smtp_error) from error
        return {"message_id": message_id}

    def handle_processing_result(self, item_id: str, result: dict[str, str]) -> None:
        """Keep the id the email went out under."""
        self.get_queryset().filter(pk=item_id).update(message_id=result["message_id"])


def connection() -> Any:
    """Return the mail server named in OUTBOX_SMTP, else what the shop uses."""
    if not settings.OUTBOX_SMTP:
        return get_connection()
    host, _, port = settings.OUTBOX_SMTP.rpartition(":")
    backend = "django.core.mail.backends.smtp.EmailBackend"
    return get_connection(backend, host=host, port=int(port), timeout=10)


def verdict(code: int, text: bytes | str) -> Exception:
    """Read a server's refusal: 4xx is "not now", 5xx is "never"."""
    said = f"{code} {text.decode(errors='replace') if isinstance(text, bytes) else text}"
    return RateLimitExceededError(said) if 400 <= code < 500 else PermanentError(said)
