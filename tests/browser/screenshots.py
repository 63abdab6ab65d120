"""Pictures of every screen of the dashboard: light and dark, 1280 and 390 px wide.

    python -m tests.browser.screenshots [--to DIRECTORY] [--two-databases]

With ``--two-databases`` the queue `stock` has a database of its own, so each screen shows the
choice of the database; pages whose names end with ``2`` are those of the second one.

The example shop runs its demo on SQLite; a day of figures is added, since pictures of a minute
would show empty charts. Needs Chromium (`python -m tests` installs it on Debian).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from tests.browser import chromium
from tests.services.ports import free_port
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
WIDE, NARROW = (1280, 800), (390, 800)
LOOKS = (("light", WIDE), ("dark", WIDE), ("light", NARROW), ("dark", NARROW))
TALLEST = 1600
HANDLERS = (("emails", "shop.send_confirmation", 240), ("stock", "shop.reserve_stock", 210))
HANDLERS += (("invoices", "shop.write_invoice", 150),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the pictures; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots")
    parser.add_argument("--to", type=Path, default=Path("screenshots"), help="directory")
    parser.add_argument("--two-databases", action="store_true", help="show the choice of one")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["KJO_EXAMPLE_DB"] = str(Path(directory) / "shop.sqlite3")
        os.environ["KJO_EXAMPLE_MAIL"] = str(Path(directory) / "mail")
        os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
        subprocess.run([*manage(), "demo", "--orders", "400"], cwd=ROOT, check=True)
        if options.two_databases:
            os.environ["KJO_EXAMPLE_SECOND_DB"] = str(Path(directory) / "jobs2.sqlite3")
            os.environ["DJANGO_SETTINGS_MODULE"] = "tests.browser.two_databases"
            subprocess.run([*manage(), "migrate", "--database", "jobs2"], cwd=ROOT, check=True)
        prepare(has_two_databases=options.two_databases)
        port = free_port()
        server = ("runserver", "--noreload", f"127.0.0.1:{port}")
        with running("kjo_consume", "--status-interval", "0"), running(*server):
            wait_for(port)
            for scheme, (width, height) in LOOKS:
                with chromium.running(width=width, height=height, scheme=scheme) as browser:
                    photograph(
                        browser,
                        f"http://127.0.0.1:{port}/admin",
                        options.to,
                        scheme,
                        width,
                        has_two_databases=options.two_databases,
                    )
    return 0


def manage() -> list[str]:
    return [sys.executable, str(ROOT / "manage.py")]


@contextmanager
def running(*arguments: str) -> Iterator[None]:
    process = subprocess.Popen(
        [*manage(), *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def wait_for(port: int) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(5)  # sleep: until the worker has shown its signs of life
                return
        time.sleep(0.1)  # sleep: until the next look
    raise SystemExit("error: the site never came up")


def prepare(*, has_two_databases: bool) -> None:
    """Add an operator, and a day of figures before now, the same every time."""
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.utils import timezone

    from example_project.shop.jobs import adjust_stock, write_invoice
    from example_project.shop.models import Order
    from kjo_django import registry
    from kjo_django.limits.control import set_limit
    from kjo_django.models import MetricBucket, MetricRollup, Worker
    from kjo_django.operations import schedules
    from kjo_django.personal_data.erasure import start_erasure
    from kjo_django.personal_data.person import Person

    User.objects.create_superuser("operator", password="operator")
    payload = {"order_id": 1, "invoice_number": 1}
    night = {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}
    schedules.add("nightly-invoice", job="shop.write_invoice", payload=payload, **night)
    set_limit("job:shop.write_invoice", rate="1/h", actor="operator")
    set_limit("queue:emails", rate="50/s", burst=10, actor="operator")
    set_limit("job:shop.adjust_stock", concurrency=3, actor="operator")
    start_erasure(
        Person.of(fields=[("order_id", "7")]), actor="operator", dry_run=True, reference="R-17"
    )
    for number in range(4):
        write_invoice.enqueue(order_id=1, invoice_number=str(number))
    if has_two_databases:
        for order in Order.objects.order_by("pk")[:60]:
            adjust_stock.enqueue(order_id=order.pk, stock_code=order.stock_code)
    now = timezone.now().replace(second=0, microsecond=0)
    chance = random.Random(7)
    worker = Worker.objects.first()
    assert worker is not None
    rows: list[MetricBucket | MetricRollup] = []
    for minutes, count, model in ((1, 60, MetricBucket), (15, 96, MetricRollup)):
        for index in range(1, count + 1):
            start = now - timedelta(minutes=minutes * index)
            start = start.replace(minute=start.minute // minutes * minutes)
            for queue, handler, most in HANDLERS:
                wave = 0.55 + 0.45 * math.sin(index * minutes / 60 * math.tau / 12)
                done = int(most * minutes * wave * chance.uniform(0.8, 1.1))
                histogram = [0] * 24
                for place, share in ((2, 0.5), (3, 0.3), (4, 0.15), (6, 0.04), (9, 0.01)):
                    histogram[place + (1 if index % 13 == 0 else 0)] = int(done * share)
                figures = {
                    "minute": start,
                    "queue": queue,
                    "handler": handler,
                    "worker_id": worker.pk,
                    "completed_count": done,
                    "retried_count": done // 60,
                    "failed_count": done // 150 if index % 17 == 0 else 0,
                    "run_histogram": histogram,
                    "wait_histogram": [0, *histogram[:-1]],
                }
                extra = {"minutes": minutes} if model is MetricRollup else {}
                rows.append(model(**figures, **extra))
            for queue in registry.consumed_queue_names():
                lag = int(40 * wave * chance.random()) if queue == "emails" else 0
                rows.append(model(minute=start, queue=queue, worker_id=worker.pk, lag=lag, **extra))
    for model in (MetricBucket, MetricRollup):
        model.objects.bulk_create([r for r in rows if type(r) is model], ignore_conflicts=True)


def photograph(  # type: ignore[no-untyped-def]
    browser, admin: str, to: Path, scheme: str, width: int, *, has_two_databases: bool
) -> None:
    """Log in and take every screen, as high as its content."""
    from kjo_django.models import NEVER, DeadLetter, Job, Schedule, Workflow
    from kjo_django.personal_data.erasure import ERASE

    browser.get(f"{admin}/login/")
    browser.find_element("name", "username").send_keys("operator")
    browser.find_element("name", "password").send_keys("operator")
    browser.find_element("css selector", "[type=submit]").click()
    letter = DeadLetter.objects.order_by("pk").first()
    job = Job.objects.filter(failures__isnull=False).order_by("pk").first()
    assert letter is not None
    assert job is not None
    waiting = Job.objects.filter(available_at=NEVER).first()
    assert waiting is not None
    schedule = Schedule.objects.first()
    assert schedule is not None
    workflow = Workflow.objects.order_by("pk").first()
    assert workflow is not None
    erasure = Job.objects.get(handler=ERASE)
    screens = {
        "overview": "",
        "queues": "queues/",
        "queue": "queues/emails/",
        "handlers": "handlers/",
        "handler": "handlers/shop.send_confirmation/",
        "jobs": "jobs/?q=queue:emails",
        "job": f"jobs/{job.pk}/",
        "jobs-plain": "../job/",
        "job-plain": f"../job/{job.pk}/change/",
        "jobs-waiting": "jobs/?q=handler:shop.write_invoice",
        "job-waiting": f"jobs/{waiting.pk}/",
        "limits": "limits/",
        "limit-edit": "limits/job:shop.write_invoice/",
        "schedule-delete": f"schedules/{schedule.pk}/delete/",
        "schedules": "schedules/",
        "schedule": f"schedules/{schedule.pk}/",
        "schedule-edit": f"schedules/{schedule.pk}/edit/",
        "workflows": "workflows/",
        "workflow": f"workflows/{workflow.pk}/",
        "dead-letters": "dead-letters/",
        "dead-letter": f"dead-letters/{letter.pk}/",
        "edit": f"dead-letters/{letter.pk}/edit/",
        "replay": f"dead-letters/replay/?fingerprint={letter.fingerprint}",
        "consumers": "consumers/",
        "events": "events/",
        "status": "status/",
        "personal-data": "personal-data/",
        "erasure": f"personal-data/{erasure.pk}/",
    }
    if has_two_databases:
        for name in ("", "queues", "jobs", "dead-letters", "limits", "schedules", "consumers"):
            screens[f"{name or 'overview'}2"] = f"{name and name + '/'}?database=jobs2"
        screens["overview-again"] = "?database=default"
    for name, path in screens.items():
        chromium.look(browser, width=width, height=800, scheme=scheme)
        browser.get(f"{admin}/kjo_django/dashboard/{path}")
        height = browser.execute_script("return document.documentElement.scrollHeight")
        chromium.look(browser, width=width, height=min(height, TALLEST), scheme=scheme)
        file = to / f"{name}-{width}-{scheme}.png"
        browser.save_screenshot(str(file))
        print(file)


if __name__ == "__main__":
    sys.exit(main())
