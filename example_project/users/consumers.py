"""What the user service does when others tell it something."""

from django.db.models import F

from example_project.users.models import User
from kjo_django import BaseEvent, event_handler


@event_handler("INTERVIEW_SCHEDULED", topic="interview-events")
def count_interview(event: BaseEvent) -> None:
    """Count it: the kind of effect that shows when an event takes effect twice."""
    User.objects.filter(pk=event.user_id).update(interview_count=F("interview_count") + 1)
