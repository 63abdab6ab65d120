"""The Django app."""

from django.apps import AppConfig


class OutboxConfig(AppConfig):
    """Its producer and its consumer are found by kjo_django."""

    name = "example_project.outbox"
    label = "outbox"
    verbose_name = "Outbox"
