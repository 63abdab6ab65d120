"""Settings of the tests: the embedded default, unless the environment names real servers."""

import json
import logging
import os
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.absence import take_away

take_away()

SECRET_KEY = "tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "kjo_django",
    "tests.ledger",
    "tests.queueing",
    "tests.items",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "tests.browser.middleware.StrictPolicy",
    "tests.browser.middleware.CountQueries",
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


def use_pymysql() -> None:
    """Have Django take PyMySQL for the driver it knows, as a project's settings do."""
    import pymysql

    pymysql.install_as_MySQLdb()


def database(url: str) -> dict[str, Any]:
    """Turn ``postgresql://user:password@host:port/name``, ``mysql://…`` or ``sqlite:///path`` into
    settings. PostgreSQL may have several hosts: ``host:port,host:port``."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": parts.path.removeprefix("/") if parts.path != "/" else ":memory:",
            "OPTIONS": {"timeout": 30},
            # A file, so that several threads and processes see one database.
            "TEST": {"NAME": os.environ.get("KJO_TEST_SQLITE") or None},
        }
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    engine = "postgresql"
    if parts.scheme == "mysql":
        use_pymysql()
        engine = "mysql"
        # PyMySQL reads all certificates of the system for every connection: 20 ms of CPU.
        options["ssl_disabled"] = True
    servers = [urlsplit(f"//{each}") for each in parts.netloc.rpartition("@")[2].split(",")]
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": parts.path.removeprefix("/"),
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": ",".join(each.hostname or "" for each in servers),
        "PORT": ",".join(str(each.port or "") for each in servers),
        "OPTIONS": options,
    }


def cache(url: str) -> dict[str, Any]:
    """Turn ``redis://host:port/0``, or ``sentinel://host:port,host:port/name/0``, into settings."""
    if not url.startswith("sentinel://"):
        return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    addresses, _, name = url.removeprefix("sentinel://").partition("/")
    pairs = [address.rpartition(":") for address in addresses.split(",")]
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://{name}",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [(host, int(port)) for host, _, port in pairs],
            "SOCKET_CONNECT_TIMEOUT": 1,
            "SOCKET_TIMEOUT": 1,
        },
    }


DATABASE_ROUTERS = ["tests.routers.NoReplica"]
DATABASES = {"default": database(os.environ.get("DATABASE_URL", "sqlite:///:memory:"))}
if os.environ.get("DIRECT_DATABASE_URL"):  # past a pooler
    DATABASES["direct"] = database(os.environ["DIRECT_DATABASE_URL"])
if os.environ.get("JOBS2_DATABASE_URL"):  # of queues with a database of their own
    DATABASES["jobs2"] = database(os.environ["JOBS2_DATABASE_URL"])
    DATABASE_ROUTERS.insert(0, "tests.ledger.routers.WithItsJob")
# Read when REST framework is first imported; its applications are not installed here, so that the
# rest is seen to work without them (tests/api/settings.py installs them).
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.BasicAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
LOGGING_CONFIG = None

# The real engine, when the environment names it (as `python -m tests.services run` does).
KJO: dict[str, Any] = {
    "SERVICE_NAME": "tests",
    "QUEUES": {"ledger": {}},
    "BACKOFF_BASE": 0.2,
    "POLL_INTERVAL": 0.5,
    "HEARTBEAT_INTERVAL": 1,
    "PROCESSING_TTL": 30,
    "RECORD_LEASE": 5,
    "ERROR_RECOVERY_DELAYS": {},
    "TOPIC_OPTIONS": {"partitions": 4, "replication_factor": 1},
}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
if os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
    KJO["TRANSPORTS"] = {
        "default": {
            "BACKEND": "kjo_django.transports.kafka.KafkaTransport",
            "OPTIONS": {
                "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
                # Crash tests wait for the group to notice a killed member.
                "consumer": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
            },
        }
    }
if os.environ.get("REDIS_URL"):
    CACHES["default"] = cache(os.environ["REDIS_URL"])
    KJO["COORDINATION"] = {
        "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
        "OPTIONS": {"CACHE": "default"},
    }

# What one test asks for in the processes it starts: keys of KJO, and what they log.
KJO.update(json.loads(os.environ.get("KJO_TEST_SETTINGS", "{}")))
for _transport in KJO.get("TRANSPORTS", {}).values():
    if seconds := _transport.get("OPTIONS", {}).get("request_timeout"):
        _transport["OPTIONS"]["request_timeout"] = timedelta(seconds=seconds)
if os.environ.get("KJO_TEST_LOG_LEVEL"):
    logging.basicConfig(
        level=os.environ["KJO_TEST_LOG_LEVEL"],
        format="%(asctime)s %(process)d %(threadName)s %(levelname)s %(message)s",
    )
