"""``update_profile EMAIL NAME``: change a user, as a form would."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from example_project.users.models import User


class Command(BaseCommand):
    """Create or rename a user and say which event tells of it."""

    help = "Create or rename a user; other services are told."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare who and what."""
        parser.add_argument("email")
        parser.add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it."""
        user, _ = User.objects.get_or_create(email=options["email"])
        event = user.update_profile(name=options["name"])
        self.stdout.write(f"{user.name} <{user.email}>: {user.interview_count} interviews")
        self.stdout.write(f"Told of it: {event.type} {event.id}")
