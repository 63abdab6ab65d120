from django.core.management.base import BaseCommand

from shop.tasks import sync_all, sync_stock


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("sku", nargs="+")
        parser.add_argument("--together", action="store_true")

    def handle(self, *args, **options):
        if options["together"]:
            sync_all(options["sku"])
            return
        for sku in options["sku"]:
            sync_stock.apply_async([sku], queue="warehouse")
