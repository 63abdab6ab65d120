from datetime import timedelta
from functools import partial

from django.db import transaction
from django.utils import timezone

from shop import tasks
from shop.models import Order
from shop.tasks import charge_order, notify_warehouse, send_receipt


def place_order(email, total):
    with transaction.atomic():
        order = Order.objects.create(email=email, total=total)
        transaction.on_commit(lambda: charge_order.delay(order.pk))
        transaction.on_commit(partial(notify_warehouse.delay, order.pk))
    return order


def remind_later(order):
    send_receipt.apply_async((order.pk,), {"copy": True}, countdown=3600)


def remind_tomorrow(order):
    send_receipt.apply_async(
        args=[order.pk],
        eta=timezone.now() + timedelta(days=1),
        expires=timezone.now() + timedelta(days=2),
    )


def charge_soon(order):
    return charge_order.apply_async(
        kwargs={"order_id": order.pk}, countdown=10, queue="payments", priority=5
    ).id


def resend(order, copy=False):
    result = send_receipt.delay(order.pk, copy=copy)
    return result.id


def receipt_now(order):
    return tasks.send_receipt(order.pk)


def sync(skus):
    for sku in skus:
        tasks.sync_stock.delay(sku)


async def resend_from_chat(order_id):
    result = send_receipt.delay(order_id)
    return str(result.id)


def charge_once(order):
    charge_order.apply_async(args=(order.pk,), task_id=f"charge-{order.pk}", expires=600)
