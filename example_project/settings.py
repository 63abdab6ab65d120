"""Settings of the example project.

With nothing in the environment it needs no server. Each of three variables moves one part of it to
a real one, independently of the others:

    KAFKA_BOOTSTRAP_SERVERS   host:port,…                          messages go over Kafka
    REDIS_URL                 redis://host:port/0                  cache and coordination in Redis
    DATABASE_URL              postgresql://user:pw@host:port/name  PostgreSQL instead of SQLite
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent.parent

# --- Where it runs --------------------------------------------------------------------------------

# Naming its hosts is what makes it a deployment: then DEBUG is off and the key has to be a secret.
ALLOWED_HOSTS = [host for host in os.environ.get("DJANGO_ALLOWED_HOSTS", "").split(",") if host]
IS_LOCAL = not ALLOWED_HOSTS
DEBUG = os.environ.get("DJANGO_DEBUG", "1" if IS_LOCAL else "0") == "1"
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY") or ("for development only" if IS_LOCAL else "")

# --- The parts an environment variable moves ------------------------------------------------------


def sqlite(path: str) -> dict[str, Any]:
    """One file, used by web server and workers at once."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            # Readers and the one writer do not wait for each other.
            "init_command": "PRAGMA journal_mode=WAL",
            # A transaction waits for the write lock when it begins. Asking for it later, after a
            # read, fails at once with "database is locked" if another process wrote in between.
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
        },
    }


def postgresql(url: str) -> dict[str, Any]:
    """Read ``postgresql://user:password@host:port/name?sslmode=require``."""
    parts = urlsplit(url)
    try:
        port = str(parts.port or "")
    except ValueError:
        port = None
    if parts.scheme not in {"postgresql", "postgres"} or not parts.path.strip("/") or port is None:
        raise ImproperlyConfigured(
            "DATABASE_URL must look like postgresql://user:password@host:port/name; "
            "leave it out for SQLite."
        )
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.strip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": port,
        "OPTIONS": dict(parse_qsl(parts.query)),
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
    }


KAFKA = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
REDIS = os.environ.get("REDIS_URL")
POSTGRESQL = os.environ.get("DATABASE_URL")

DATABASES = {
    "default": postgresql(POSTGRESQL)
    if POSTGRESQL
    else sqlite(os.environ.get("KJO_EXAMPLE_DB") or str(BASE_DIR / "db.sqlite3"))
}

if REDIS:
    CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS}}

# --- Background jobs ------------------------------------------------------------------------------

KJO: dict[str, Any] = {
    "SERVICE_NAME": "shop",
    # Short, so that a retry can be watched. Leave it out, or raise it, for real mail servers.
    "BACKOFF_BASE": 0.5,
    "ERROR_RECOVERY_DELAYS": {"rate_limit": 2, "network": 2, "database": 2, "default": 0},
    "TOPIC_OPTIONS": {"partitions": 4, "replication_factor": 1},
    "METRICS_TOKEN": os.environ.get("METRICS_TOKEN") or None,
    "QUEUES": {
        "emails": {"topic": "shop-emails", "max_attempts": 5},
        "stock": {"topic": "shop-stock"},
        "invoices": {"topic": "shop-invoices"},
        "reports": {"topic": "shop-reports"},
    },
}
if KAFKA:
    KJO["TRANSPORTS"] = {
        "default": {
            "BACKEND": "kjo_django.transports.kafka.KafkaTransport",
            "OPTIONS": {"bootstrap.servers": KAFKA},
        }
    }
if REDIS:
    KJO["COORDINATION"] = {
        "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
        "OPTIONS": {"CACHE": "default"},
    }

# --- Mail: files in a folder instead of letters to customers --------------------------------------

EMAIL_BACKEND = "example_project.shop.mail.SimulatedGateway"
EMAIL_FILE_PATH = os.environ.get("KJO_EXAMPLE_MAIL") or str(
    BASE_DIR / "example_project" / "sent_mail"
)
SHOP_GATEWAY_REFUSES_EVERY = 20
"""The simulated gateway refuses every 20th message once; 0: none."""
DEFAULT_FROM_EMAIL = "shop@example.com"
OUTBOX_SMTP = os.environ.get("OUTBOX_SMTP", "")
"""host:port of the mail server the outbox sends to; files, as the shop's, without one."""

# --- Django ---------------------------------------------------------------------------------------

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "kjo_django",
    "example_project.shop",
    "example_project.outbox",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"
STATIC_URL = "static/"
STATIC_ROOT = os.environ.get("DJANGO_STATIC_ROOT")
if STATIC_ROOT and not DEBUG:  # docs/deploy: the web servers answer with these files, too
    MIDDLEWARE.insert(1, "whitenoise.middleware.WhiteNoiseMiddleware")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en"
TIME_ZONE = "Europe/London"
USE_TZ = True
