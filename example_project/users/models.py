"""Users, and what the service has heard of them."""

from django.db import models, transaction

from kjo_django import BaseEvent, publish_event


class User(models.Model):
    """Somebody with a profile."""

    name = models.CharField(max_length=100)
    email = models.EmailField()
    interview_count = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name

    def update_profile(self, **changes: str) -> BaseEvent:
        """Change the profile and tell the others, both or neither."""
        with transaction.atomic():
            for field, value in changes.items():
                setattr(self, field, value)
            self.save()
            data = {
                "userId": str(self.pk),
                "name": self.name,
                "email": self.email,
                "changes": sorted(changes),
            }
            event = BaseEvent(type="USER_PROFILE_UPDATED", data=data)
            return publish_event("user-events", event).event
