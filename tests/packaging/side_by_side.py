"""Settings of the processes of two releases that share one database, named by ``SIDE_BY_SIDE``."""

import os

from tests.settings import database

SECRET_KEY = "x" * 50
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": database(os.environ["SIDE_BY_SIDE"])}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "kjo_django",
    "tests.ledger",
]
KJO = {"SERVICE_NAME": "shop", "HEARTBEAT_INTERVAL": 2}  # a killed worker counts as dead after 6 s
