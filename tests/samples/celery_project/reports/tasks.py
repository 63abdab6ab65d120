import logging

from celery import chord, shared_task, signature
from django.core.mail import send_mail

from bazaar.celery import app
from reports.models import Report

logger = logging.getLogger(__name__)


@shared_task(queue="reports")
def collect(report_id, part):
    return report_id * part


@shared_task(queue="reports")
def summarize(totals, report_id):
    Report.objects.filter(pk=report_id).update(total=sum(totals), state="done")


@shared_task(queue="reports", time_limit=900)
def build_report(report_id, parts=3):
    header = [collect.s(report_id, part) for part in range(parts)]
    chord(header)(summarize.s(report_id))


@shared_task
def mail_report(report_id, to=None):
    report = Report.objects.get(pk=report_id)
    send_mail(report.title, str(report.total), None, [to or "reports@example.com"])


@shared_task
def nightly():
    for report in Report.objects.exclude(state="done"):
        build_report.delay(report.pk)
        mail_report.apply_async(args=(report.pk,), countdown=1800)


@shared_task(bind=True, max_retries=2)
def refresh_rates(self, currency="EUR"):
    if currency not in ("EUR", "USD"):
        logger.warning("%s: %s", self.name, currency)
        self.retry(countdown=60 * (self.request.retries + 1))
    return currency


@shared_task(dont_autoretry_for=(ValueError,), autoretry_for=(Exception,))
def close_report(report_id):
    Report.objects.filter(pk=report_id).update(state="closed")


def send_to_archive(report_id):
    app.send_task("archive.store", args=[report_id], queue="archive")


def later(name, *args):
    return signature(name, args=args)
