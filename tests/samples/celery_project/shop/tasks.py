"""Orders: payment, packing, stock."""

from datetime import timedelta

from celery import chain, chord, group, shared_task
from celery.utils.log import get_task_logger
from django.core.mail import send_mail
from django.db.models import F
from django.utils import timezone

from . import gateway
from .models import Import, Order, Stock

logger = get_task_logger(__name__)


@shared_task
def send_receipt(order_id, copy=False):
    order = Order.objects.get(pk=order_id)
    to = [order.email] + (["books@example.com"] if copy else [])
    send_mail(f"Receipt {order_id}", f"You paid {order.total}.", None, to)
    return order_id


@shared_task(bind=True, max_retries=5, default_retry_delay=30)
def charge_order(self, order_id):
    order = Order.objects.get(pk=order_id)
    logger.info("charge %s, attempt %s", self.request.id, self.request.retries)
    try:
        gateway.charge(order.email, order.total)
    except gateway.GatewayError as exc:
        if self.request.retries >= self.max_retries:
            Order.objects.filter(pk=order_id).update(state="unpaid")
            return "unpaid"
        raise self.retry(exc=exc, countdown=2**self.request.retries)
    Order.objects.filter(pk=order_id).update(state="paid")
    send_receipt.delay(order_id)
    return "paid"


@shared_task(name="shop.cancel_unpaid")
def cancel_unpaid():
    late = timezone.now() - timedelta(days=7)
    return Order.objects.filter(state="unpaid", created__lt=late).update(state="cancelled")


@shared_task(
    autoretry_for=(ConnectionError,),
    retry_backoff=True,
    retry_kwargs={"max_retries": 4},  # the warehouse is down at night
    rate_limit="100/m",
)
def sync_stock(sku):
    count = gateway.stock_of(sku)
    Stock.objects.update_or_create(sku=sku, defaults={"count": count})


@shared_task(queue="warehouse", acks_late=True, ignore_result=True)
def notify_warehouse(order_id):
    Order.objects.filter(pk=order_id).update(state="announced")


@shared_task
def reserve(order_id):
    Order.objects.filter(pk=order_id).update(state="reserved")


@shared_task
def pack(order_id):
    Order.objects.filter(pk=order_id, state="reserved").update(state="packed")


@shared_task(queue="warehouse")
def ship(order_id, carrier="dhl"):
    Order.objects.filter(pk=order_id, state="packed").update(state="shipped", carrier=carrier)


@shared_task
def price_of(sku, quantity):
    return len(sku) * quantity


@shared_task
def add_shipping(amount, country):
    return amount + (5 if country == "de" else 15)


@shared_task
def set_total(total, order_id):
    Order.objects.filter(pk=order_id).update(total=total)


@shared_task(ignore_result=True)
def import_row(import_id, row):
    Stock.objects.update_or_create(sku=row["sku"], defaults={"count": row["count"]})
    Import.objects.filter(pk=import_id).update(rows=F("rows") + 1)


@shared_task
def finish_import(import_id):
    Import.objects.filter(pk=import_id).update(is_finished=True)


def fulfil(order_id, carrier):
    chain(reserve.si(order_id), pack.si(order_id), ship.si(order_id, carrier)).apply_async()


def reprice(order_id, sku, quantity, country="de"):
    workflow = price_of.s(sku, quantity) | add_shipping.s(country) | set_total.s(order_id)
    return workflow.delay()


def import_rows(name, rows):
    found = Import.objects.create(name=name)
    header = [import_row.s(found.pk, row) for row in rows]
    chord(header)(finish_import.si(found.pk))
    return found


def sync_all(skus):
    return group(sync_stock.s(sku) for sku in skus).apply_async()
