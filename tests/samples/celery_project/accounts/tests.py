from unittest.mock import ANY, patch

from django.contrib.auth import get_user_model
from django.core import mail
from django.test import TestCase

from accounts import services
from accounts.models import Profile
from accounts.tasks import add_points, merge_accounts, send_password_reset, send_welcome


class SignUpTests(TestCase):
    @patch("accounts.tasks.add_points.delay_on_commit")
    @patch("accounts.services.send_welcome.delay")
    def test_a_user_is_welcomed(self, welcome, points):
        with self.captureOnCommitCallbacks(execute=True):
            user = services.sign_up("ada", "ada@example.com")
        welcome.assert_called_once_with(user.pk)
        points.assert_called_once_with(user.pk, points=10)

    def test_the_mail(self):
        user = get_user_model().objects.create_user("ada", "ada@example.com")
        send_welcome(user.pk)
        self.assertEqual(mail.outbox[0].subject, "Welcome")

    def test_the_mail_about_a_password(self):
        user = get_user_model().objects.create_user("ada", "ada@example.com")
        send_password_reset.run(user.pk, "t0ken")
        self.assertEqual(mail.outbox[0].body, "t0ken")

    def test_a_password_is_asked_for(self):
        user = get_user_model().objects.create_user("ada", "ada@example.com")
        with patch("accounts.services.send_password_reset.apply_async") as apply_async:
            services.reset_password(user, "t0ken")
        apply_async.assert_called_once()


class MergeTests(TestCase):
    def setUp(self):
        users = get_user_model().objects
        self.source = users.create_user("ada", "ada@example.com")
        self.target = users.create_user("bob", "bob@example.com")

    def test_points_are_added(self):
        for user in (self.source, self.target):
            add_points(user.pk, 5)
        merge_accounts(self.source.pk, self.target.pk)
        self.assertEqual(Profile.objects.get(user=self.target).points, 10)

    def test_it_is_asked_for(self):
        with patch("accounts.services.merge_accounts.delay") as delay:
            services.merge(self.source, self.target)
        delay.assert_called_with(self.source.pk, target_id=self.target.pk)
        delay.assert_any_call(ANY, target_id=ANY)
