"""The app of the user service."""

from django.apps import AppConfig


class Config(AppConfig):
    """Its label is its name."""

    name = "example_project.users"
    default_auto_field = "django.db.models.BigAutoField"
