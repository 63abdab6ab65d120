"""Where the emails come from."""

from example_project.outbox.models import Email
from kjo_django import ModelProducer


class EmailProducer(ModelProducer):
    """Sends emails on their way, and again when their text has changed."""

    model = Email
    queue = "outbox"
    hash_fields = ("recipient", "subject", "body")
    key_field = "recipient"
