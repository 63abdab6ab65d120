from unittest import mock

from django.test import TestCase

from reports import tasks, views
from reports.models import Report


class ReportTests(TestCase):
    def setUp(self):
        self.report = Report.objects.create(title="June")

    def test_rates(self):
        self.assertEqual(tasks.refresh_rates(), "EUR")

    def test_it_is_closed_and_mailed(self):
        with (
            mock.patch("reports.views.close_report.delay") as close,
            mock.patch("reports.views.mail_report.delay") as mail,
        ):
            views.close(self.report)
        close.assert_called_once_with(self.report.pk)
        mail.assert_called_once_with(self.report.pk, to="boss@example.com")

    @mock.patch("reports.tasks.mail_report.apply_async")
    @mock.patch("reports.tasks.build_report.delay")
    def test_each_night(self, build, mail):
        tasks.nightly()
        build.assert_called_once_with(self.report.pk)
        mail.assert_called_once_with(args=(self.report.pk,), countdown=1800)

    def test_parts_are_summed_up(self):
        tasks.summarize([1, 2], self.report.pk)
        self.report.refresh_from_db()
        self.assertEqual((self.report.total, self.report.state), (3, "done"))

    def test_closing(self):
        tasks.close_report(self.report.pk)
        self.report.refresh_from_db()
        self.assertEqual(self.report.state, "closed")
