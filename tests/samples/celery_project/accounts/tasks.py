from datetime import timedelta

from celery import Task
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth import get_user_model
from django.core.mail import send_mail
from django.utils import timezone

from accounts.models import Profile
from bazaar.celery import app


@app.task
def send_welcome(user_id):
    user = get_user_model().objects.get(pk=user_id)
    send_mail("Welcome", f"Hello {user.username}", None, [user.email])


@app.task(queue="mails", priority=9)
def send_password_reset(user_id, token):
    user = get_user_model().objects.get(pk=user_id)
    send_mail("Your password", token, None, [user.email])


@app.task(ignore_result=True)
def deactivate_idle():
    year = timezone.now() - timedelta(days=365)
    get_user_model().objects.filter(last_login__lt=year).update(is_active=False)


@app.task(name="accounts.merge", time_limit=120, soft_time_limit=100)
def merge_accounts(source_id, target_id):
    try:
        points = Profile.objects.get(user_id=source_id).points
        target = Profile.objects.get(user_id=target_id)
        target.points += points
        target.save()
        Profile.objects.filter(user_id=source_id).update(points=0, is_merged=True)
    except SoftTimeLimitExceeded:
        Profile.objects.filter(user_id=source_id).update(is_merged=False)
        raise


@app.task(bind=True)
def export_account(self, user_id):
    for done in range(0, 100, 10):
        self.update_state(state="PROGRESS", meta={"done": done})
    return {"user": user_id}


@app.task(serializer="json", acks_late=True, reject_on_worker_lost=True, track_started=True)
def add_points(user_id, points):
    profile, _ = Profile.objects.get_or_create(user_id=user_id)
    profile.points += points
    profile.save()


class LegacySync(Task):
    name = "accounts.legacy_sync"

    def run(self, user_id):
        return user_id
