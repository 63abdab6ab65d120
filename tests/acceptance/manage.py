"""`manage.py` for processes of a test: they do not outlive it, kill -9 included.

python -m tests.acceptance.manage kjo_consume ledger
"""

import ctypes
import gc
import os
import signal
import sys
from datetime import timedelta

import django
from django.contrib.admin.apps import AdminConfig, SimpleAdminConfig
from django.core.management import execute_from_command_line
from django.utils import timezone

PR_SET_PDEATHSIG = 1
WORKERS = ("kjo_consume", "kjo_produce", "kjo_schedule")


def die_with_parent() -> None:
    """Ask for SIGKILL when the thread that started this process ends, where Linux offers it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ["KJO_TEST_PARENT"]):
            os.kill(os.getpid(), signal.SIGKILL)


def leave_admin() -> None:
    """Do not import what serves pages: a worker of the tests starts a fifth quicker."""
    AdminConfig.ready = SimpleAdminConfig.ready


def give_checks(seconds: float) -> None:
    """Let the overview wait only so long for the health checks."""
    django.setup()
    from kjo_django.admin.dashboard import overview

    overview.HEALTH_TIMEOUT = seconds


def set_clock(seconds: float) -> None:
    """Let the host's clock be wrong: for whatever is imported from now on."""
    now = timezone.now
    timezone.now = lambda: now() + timedelta(seconds=seconds)


if __name__ == "__main__":
    gc.disable()  # while it starts: to look at what stays takes a quarter longer
    die_with_parent()
    if sys.argv[1] in WORKERS:
        leave_admin()
    if seconds := os.environ.get("KJO_TEST_CLOCK_AHEAD"):
        set_clock(float(seconds))
    if seconds := os.environ.get("KJO_TEST_HEALTH_SECONDS"):
        give_checks(float(seconds))
    django.setup()
    gc.enable()
    execute_from_command_line(sys.argv)
