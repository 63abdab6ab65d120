"""The producer of the items."""

from kjo_django import ModelProducer
from tests.items.models import Item


class ItemProducer(ModelProducer):
    """Polls `Item`."""

    model = Item
    queue = "items"
    hash_fields = ("email", "body")
