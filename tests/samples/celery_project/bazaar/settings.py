import sys
from datetime import timedelta

from celery.schedules import crontab

SECRET_KEY = "sample"
USE_TZ = True
TIME_ZONE = "Europe/Berlin"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "kjo_django",
    "shop",
    "accounts",
    "media.apps.MediaConfig",
    "reports",
    "notifications",
    "catalog",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "bazaar.sqlite3"}}
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"

CELERY_BROKER_URL = "redis://localhost:6379/0"
CELERY_TASK_ALWAYS_EAGER = "test" in sys.argv
CELERY_TASK_EAGER_PROPAGATES = True
CELERY_TASK_TIME_LIMIT = 15 * 60
CELERY_TIMEZONE = TIME_ZONE
CELERY_BEAT_SCHEDULE = {
    "cancel-unpaid": {
        "task": "shop.cancel_unpaid",
        "schedule": crontab(minute="*/15"),
    },
    "nightly-reports": {
        "task": "reports.tasks.nightly",
        "schedule": crontab(hour=3, minute=30, day_of_week="mon-fri"),
        "options": {"queue": "reports", "expires": 3600},
    },
    "purge": {
        "task": "notifications.tasks.purge_old",
        "schedule": timedelta(hours=6),
        "args": (30,),
    },
    "refresh-rates": {
        "task": "reports.tasks.refresh_rates",
        "schedule": 300.0,
        "kwargs": {"currency": "EUR"},
    },
}
