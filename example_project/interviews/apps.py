"""The app of the interview service."""

from django.apps import AppConfig


class Config(AppConfig):
    """Its label is its name."""

    name = "example_project.interviews"
    default_auto_field = "django.db.models.BigAutoField"
