"""The peers, and the settings they are measured with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CELERY = ("celery[redis]>=5.5,<6", "hiredis")


@dataclass(frozen=True)
class Peer:
    """A job queue, how it is set up, and what is left of a job once it has run."""

    name: str
    side: str
    """The program in `sides/`."""
    requirements: tuple[str, ...]
    jobs: int
    leaves: str
    """What tells afterwards that a job has run."""
    setup: str
    """Its settings, for readers."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its side that choose them."""
    has_database: bool = False
    least_python: tuple[int, int] = (3, 0)


PEERS = (
    Peer(
        "celery",
        "celery_side.py",
        CELERY,
        10_000,
        "nothing",
        "Redis broker, no result backend, acknowledged early (the default), task events, gossip, "
        "mingle and heartbeat off, hiredis",
        {"PROCESSES": "2", "POOL": "solo", "CONCURRENCY": "1", "PREFETCH": "256"},
    ),
    Peer(
        "celery with a row",
        "celery_row_side.py",
        (*CELERY, "django>=5.2,<6", "psycopg[binary]>=3.2"),
        4_000,
        "a row, and a marker against a second run",
        "as above, but acknowledged late and rejected when a worker is lost; in one transaction "
        "of Django's ORM a marker is inserted and the job's row completed; persistent connections",
        {"PROCESSES": "2", "POOL": "solo", "CONCURRENCY": "1", "PREFETCH": "64"},
        has_database=True,
    ),
    Peer(
        "dramatiq",
        "dramatiq_side.py",
        ("dramatiq[redis]", "hiredis"),
        30_000,
        "nothing",
        "Redis broker without any middleware (no retries, no limits), hiredis",
        {"PROCESSES": "2", "THREADS": "4", "dramatiq_queue_prefetch": "5000"},
    ),
    Peer(
        "huey",
        "huey_side.py",
        ("huey", "redis", "hiredis"),
        20_000,
        "nothing",
        "Redis with blocking reads, results off, periodic tasks and health checks off, hiredis",
        {"WORKERS": "2", "WORKER_TYPE": "process"},
    ),
    Peer(
        "procrastinate",
        "procrastinate_side.py",
        ("procrastinate", "psycopg[binary]>=3.2"),
        4_000,
        "a row",
        "PostgreSQL, async task, finished jobs kept (the default)",
        {"PROCESSES": "2", "CONCURRENCY": "10"},
        has_database=True,
    ),
    Peer(
        "django-tasks-db",
        "django_tasks_side.py",
        ("django-tasks-db", "django-tasks>=0.12", "django>=5.2,<6", "psycopg[binary]>=3.2"),
        3_000,
        "a row",
        "PostgreSQL, persistent connections",
        {"PROCESSES": "2"},
        has_database=True,
    ),
)


PSYCOPG = "psycopg[binary]>=3.2"
TIMED_PEERS = (
    Peer(
        "oban",
        "oban_side.py",
        ("oban", PSYCOPG),
        3_000,
        "a row",
        "Oban for Python, coroutines on uvloop, woken by notifications (its defaults), no "
        "transaction around the handler",
        {"LIMIT": "10"},
        has_database=True,
        least_python=(3, 13),
    ),
    Peer(
        "dj-queue",
        "dj_queue_side.py",
        ("dj-queue[postgres]", "django>=6.0", PSYCOPG),
        3_000,
        "a row",
        "Django tasks, woken by notifications and skipping locked rows (its defaults), persistent "
        "connections",
        {"THREADS": "3"},
        has_database=True,
        least_python=(3, 13),
    ),
    Peer(
        "django-ox",
        "django_ox_side.py",
        ("django-ox", "django>=6.0", PSYCOPG),
        3_000,
        "a row",
        "Django tasks, polling, persistent connections",
        {"CONCURRENCY": "8", "INTERVAL": "0.05"},
        has_database=True,
        least_python=(3, 13),
    ),
)
"""Queues on PostgreSQL alone, measured at the rates that people run instead of drained."""


def chosen(names: list[str], peers: tuple[Peer, ...] = PEERS) -> list[Peer]:
    """Return the peers of these names; all if none is named."""
    return [peer for peer in peers if not names or peer.name in names]
