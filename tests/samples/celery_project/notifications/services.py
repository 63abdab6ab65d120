from django.db import transaction

from notifications.tasks import audit, broadcast, deliver_webhook, digest, fan_out, push


def welcome(user):
    transaction.on_commit(lambda pk=user: push.delay(pk, "Welcome"))
    audit.delay("welcome", user=user)


def tell_all(users, text):
    broadcast.delay(text, users=users)
    for user in users:
        digest.apply_async(kwargs={"user_id": user}, queue="mails")


def hook(url, body):
    deliver_webhook.delay(url, body)


def several(users):
    fan_out.delay(*users)


def by_arguments(arguments):
    push.delay(*arguments)


def by_dict(arguments):
    push.delay(**arguments)
