from celery import shared_task

from shop.partner import announce


@shared_task(bind=True, queue="partners", max_retries=3)
def export(self, order_id):
    try:
        announce(order_id, key=self.request.id)
    except OSError as exc:
        raise self.retry(exc=exc, countdown=60)


@shared_task(expires=600)
def remind(order_id):
    announce(order_id, key="")
