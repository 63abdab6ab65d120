"""How long every screen of the dashboard takes on a large database, and how many queries.

    python -m tests.benchmarks.seed --jobs 10000000 --dead-letters 200000 --database-url …
    python -m tests.benchmarks.screens --database-url … [--rounds 20] [--json]

Each round asks with an empty cache, as the first of many who look would. Exits with 1 where one
of them is over its budget: a median of 300 ms, twelve queries.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

BUDGET_SECONDS = 0.3
BUDGET_QUERIES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask for every screen; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.screens")
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["DATABASE_URL"] = options.database_url
    os.environ.setdefault("KJO_BENCHMARK_TOPIC", "seed")
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    import django

    django.setup()
    results = measure(options.rounds)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for row in results:
            mark = "" if row["is_ok"] else "  OVER BUDGET"
            print(
                f"{row['median'] * 1000:8.1f} ms {row['worst'] * 1000:8.1f} ms "
                f"{row['queries']:3} queries  {row['screen']}{mark}"
            )
    return 0 if all(row["is_ok"] for row in results) else 1


def screens() -> dict[str, str]:
    """Return an address of every kind of page, of rows in the middle of the table."""
    from kjo_django.models import Job, LimitControl, Schedule, Workflow
    from kjo_django.operations.dead_letters import DeadLetterFilter, select
    from kjo_django.registry import queue_names

    letter = select(DeadLetterFilter()).order_by("-pk").first()
    failed = Job.objects.filter(state="failed").order_by("-pk").first()
    schedule = Schedule.objects.order_by("name").first()
    workflow = Workflow.objects.order_by("-pk").first()
    limit = LimitControl.objects.order_by("name").first()
    assert letter is not None
    assert failed is not None
    assert schedule is not None
    assert workflow is not None
    assert limit is not None
    root = "/admin/kjo_django/dashboard/"
    return {
        **{f"overview, {length}": f"{root}?range={length}" for length in ("5m", "1h", "24h", "7d")},
        "queues": f"{root}queues/",
        "one queue, 7d": f"{root}queues/{queue_names()[0]}/?range=7d",
        "handlers": f"{root}handlers/",
        "one handler, 7d": f"{root}handlers/{failed.handler}/?range=7d",
        "jobs": f"{root}jobs/",
        "jobs, failed": f"{root}jobs/?q=state:failed",
        "jobs, completed": f"{root}jobs/?q=state:completed",
        "jobs, processing": f"{root}jobs/?q=state:processing",
        "jobs of a queue": f"{root}jobs/?q=queue:{failed.queue}",
        "jobs of a handler that is none": f"{root}jobs/?q=handler:no.such",
        "jobs by a word": f"{root}jobs/?q=nowhere",
        "jobs by an argument": f"{root}jobs/?q=args.nothing:1",
        "jobs by an error": f"{root}jobs/?q=error:timeout",
        "jobs of last week": f"{root}jobs/?q=until:5d",
        "all jobs found, before a change": f"{root}jobs/all/requeue/?q=state:failed",
        "one job": f"{root}jobs/{failed.pk}/",
        "dead letters by error": f"{root}dead-letters/",
        "dead letters one by one": f"{root}dead-letters/all/",
        "dead letters of a handler": f"{root}dead-letters/?handler={letter.handler}",
        "dead letters with a text": f"{root}dead-letters/all/?error=nowhere",
        "one dead letter": f"{root}dead-letters/{letter.pk}/",
        "a replay's preview": f"{root}dead-letters/replay/?all=1",
        "a group's preview": f"{root}dead-letters/replay/?fingerprint={letter.fingerprint}",
        "limits": f"{root}limits/",
        "one limit": f"{root}limits/{limit.name}/",
        "schedules": f"{root}schedules/",
        "schedules by a word": f"{root}schedules/?q=nowhere",
        "one schedule": f"{root}schedules/{schedule.pk}/",
        "workflows": f"{root}workflows/",
        "workflows, failed": f"{root}workflows/?state=failed",
        "workflows by a name": f"{root}workflows/?q=nowhere",
        "one workflow": f"{root}workflows/{workflow.pk}/",
        "jobs of a workflow": f"{root}jobs/?q=workflow:{workflow.pk}",
        "consumers": f"{root}consumers/",
        "events": f"{root}events/",
        "an event": f"{root}events/?id={failed.pk}",
        "status": f"{root}status/",
    }


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return each screen's median and worst seconds, and its queries."""
    from django.contrib.auth.models import User
    from django.core.cache import cache
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    User.objects.filter(username="benchmark").delete()
    client = Client()
    client.force_login(User.objects.create_superuser("benchmark"))
    results = []
    for name, address in screens().items():
        seconds, queries = [], 0
        for _ in range(rounds):
            cache.clear()
            started = time.perf_counter()
            with CaptureQueriesContext(connection) as captured:
                response = client.get(address)
            seconds.append(time.perf_counter() - started)
            # BEGIN and COMMIT around a cursor of the server are none.
            asked = [each for each in captured if each["sql"] not in ("BEGIN", "COMMIT")]
            queries = max(queries, len(asked))
            assert response.status_code == 200, (address, response.status_code)
        median = statistics.median(seconds)
        results.append(
            {
                "screen": name,
                "median": round(median, 4),
                "worst": round(max(seconds), 4),
                "queries": queries,
                "is_ok": median < BUDGET_SECONDS and queries <= BUDGET_QUERIES,
            }
        )
    return results


if __name__ == "__main__":
    sys.exit(main())
