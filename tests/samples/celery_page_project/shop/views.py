from django.db import transaction

from shop.tasks import export, remind


def close(order):
    order.close()
    transaction.on_commit(lambda: export.delay(order.pk))
    remind.delay(order.pk)


def close_later(order):
    export.apply_async((order.pk,), countdown=3600, priority=5)
