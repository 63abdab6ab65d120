from celery.result import AsyncResult
from django.contrib.auth import get_user_model
from django.db.transaction import on_commit

from accounts.tasks import (
    add_points,
    deactivate_idle,
    export_account,
    merge_accounts,
    send_password_reset,
    send_welcome,
)


def sign_up(username, email):
    user = get_user_model().objects.create_user(username, email)
    on_commit(lambda: send_welcome.delay(user.pk))
    add_points.delay_on_commit(user.pk, points=10)
    return user


def reset_password(user, token):
    send_password_reset.apply_async((user.pk, token), expires=15 * 60)


def merge(source, target):
    merge_accounts.delay(source.pk, target_id=target.pk)


def start_export(user):
    return export_account.delay(user.pk).id


def export_state(task_id):
    return AsyncResult(task_id).state


def clean_up():
    deactivate_idle.delay()


def reward(users):
    for user in users:
        add_points.apply_async(kwargs=dict(user_id=user.pk, points=5))
