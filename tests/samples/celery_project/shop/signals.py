from django.db.models.signals import post_save
from django.dispatch import receiver

from .models import Stock
from .tasks import sync_stock


@receiver(post_save, sender=Stock, dispatch_uid="shop.stock")
def stock_changed(sender, instance, **kwargs):
    if instance.count < 0:
        sync_stock.delay(sku=instance.sku)
