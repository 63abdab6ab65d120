"""Settings of the framework's own tests: every task on the backend that is examined."""

import os
from importlib.util import find_spec

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as OURS
from tests.settings import KJO as SETTINGS

SUBJECT = os.environ.get("KJO_UPSTREAM_SUBJECT", "kjo")
PLACE = "tests.contrib.upstream.backends" if SUBJECT == "kjo" else "kjo_django.contrib.tasks"

TASKS = {"default": {"BACKEND": f"{PLACE}.DummyBackend", "QUEUES": []}}
INSTALLED_APPS = [*OURS] if find_spec("django.tasks") else [*OURS, "django_tasks"]
# Django's built-in backends try once.
KJO = {**SETTINGS, "QUEUES": {"default": {"max_attempts": 1}}}
