"""A project with the REST API and its schema, as the how-to says."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "rest_framework", "drf_spectacular"]
ROOT_URLCONF = "tests.api.urls"
SILENCED_SYSTEM_CHECKS = ["kjo.W004"]
SPECTACULAR_SETTINGS = {"TITLE": "Tests", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}
