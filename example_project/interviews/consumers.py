"""What the interview service does when others tell it something."""

from example_project.interviews.models import Candidate, Interview
from kjo_django import BaseEvent, event_handler, publish_event


@event_handler("USER_PROFILE_UPDATED", topic="user-events", versions=["1"])
def follow_user(event: BaseEvent) -> None:
    """Know the user by the present name; meet somebody new."""
    known, is_new = Candidate.objects.get_or_create(user_id=event.user_id)
    if event.timestamp >= known.told_at:
        # A retry comes after later events: the older word does not count any more.
        known.name, known.told_at = event.data["name"], event.timestamp
        known.save()
    if is_new:
        interview = Interview.objects.create(candidate=known)
        data = {"interviewId": str(interview.pk), "userId": event.user_id, "kind": interview.kind}
        # It inherits the correlation of the event it answers, and names it as its cause.
        publish_event("interview-events", BaseEvent(type="INTERVIEW_SCHEDULED", data=data))
