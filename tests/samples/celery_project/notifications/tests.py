from unittest.mock import patch

from django.test import TestCase

from notifications import services
from notifications.models import Notice
from notifications.tasks import audit, broadcast, count_down, deliver_webhook, digest, push


class NoticeTests(TestCase):
    def test_a_notice_is_kept(self):
        push(7, "hello", badge=2)
        self.assertEqual(Notice.objects.get().badge, 2)

    @patch("notifications.tasks.push.delay")
    def test_all_are_told(self, delay):
        broadcast("hello", [1, 2])
        delay.assert_any_call(1, "hello", badge=1)
        delay.assert_any_call(2, "hello", badge=1)

    def test_a_digest_follows_itself(self):
        with (
            patch("notifications.tasks.push.delay") as delay,
            patch.object(digest, "apply_async") as again,
        ):
            digest(7)
        delay.assert_called_once_with(7, "0 notices")
        self.assertEqual(again.call_count, 1)

    def test_a_webhook_that_is_not_there(self):
        with self.assertRaises(Exception):
            deliver_webhook("https://example.com", {"a": 1})

    @patch("notifications.services.deliver_webhook.delay")
    def test_a_webhook_is_delivered(self, delay):
        services.hook("https://example.com", {"a": 1})
        delay.assert_called_once_with("https://example.com", {"a": 1})
        self.assertEqual(delay.call_args[0][1], {"a": 1})

    def test_an_audit(self):
        audit("login", user=7)
        self.assertEqual(Notice.objects.get().text, "login: ['user']")

    def test_counting_down(self):
        with patch("notifications.tasks.count_down.apply_async") as again:
            self.assertEqual(count_down(2), 2)
        again.assert_called_once_with((1,), countdown=1)

    def test_tasks_run(self):
        services.by_dict({"user_id": 7, "text": "hi"})
        self.assertEqual(Notice.objects.count(), 1)
