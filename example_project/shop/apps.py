"""The Django app."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """Its jobs are found in ``jobs.py`` by kjo_django."""

    name = "example_project.shop"
    label = "shop"
    verbose_name = "Shop"
