from datetime import timedelta

import requests
from celery import shared_task
from django.utils import timezone

from notifications.models import Notice


@shared_task(autoretry_for=(OSError,), retry_kwargs={"max_retries": 2, "countdown": 10})
def push(user_id, text, *, badge=0):
    Notice.objects.create(user=user_id, text=text, badge=badge)


@shared_task
def broadcast(text, users):
    for user in users:
        push.delay(user, text, badge=1)


@shared_task
def digest(user_id):
    count = Notice.objects.filter(user=user_id).count()
    push.delay(user_id, f"{count} notices")
    tomorrow = timezone.now() + timedelta(days=1)
    digest.apply_async((user_id,), eta=tomorrow)


@shared_task
def purge_old(days=30):
    late = timezone.now() - timedelta(days=days)
    return Notice.objects.filter(created__lt=late).delete()[0]


@shared_task(bind=True, default_retry_delay=60)
def deliver_webhook(self, url, body):
    try:
        requests.post(url, json=body, timeout=5)
    except OSError as exc:
        self.retry(exc=exc)


@shared_task
def audit(event, **data):
    Notice.objects.create(user=0, text=f"{event}: {sorted(data)}")


@shared_task(bind=True)
def count_down(self, number):
    if number > 0:
        self.apply_async((number - 1,), countdown=1)
    return number


@shared_task
def fan_out(*users):
    for user in users:
        push.delay(user, "hello")
