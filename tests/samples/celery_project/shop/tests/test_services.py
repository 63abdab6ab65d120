from unittest import mock
from unittest.mock import call, patch

from django.test import TestCase

from shop import services, tasks
from shop.models import Order, Stock


class PlaceOrderTests(TestCase):
    @patch("shop.services.notify_warehouse.delay")
    @patch("shop.services.charge_order.delay")
    def test_it_is_charged_and_announced(self, charge, notify):
        with self.captureOnCommitCallbacks(execute=True):
            order = services.place_order("ada@example.com", 12)
        charge.assert_called_once_with(order.pk)
        notify.assert_called_once_with(order.pk)

    def test_a_receipt_is_sent_again(self):
        order = Order.objects.create(email="ada@example.com")
        with patch("shop.tasks.send_receipt.delay") as delay:
            services.resend(order, copy=True)
        delay.assert_called_once_with(order.pk, copy=True)

    def test_reminders_are_delayed(self):
        order = Order.objects.create(email="ada@example.com")
        with mock.patch.object(services.send_receipt, "apply_async") as apply_async:
            services.remind_later(order)
        apply_async.assert_called_once_with((order.pk,), {"copy": True}, countdown=3600)

    @patch("shop.services.send_receipt")
    def test_the_chat_sends_one(self, send_receipt):
        send_receipt.delay(7)
        send_receipt.delay.assert_called_once_with(7)

    @patch("shop.tasks.sync_stock.delay")
    def test_each_is_synchronised(self, delay):
        services.sync(["a", "b"])
        delay.assert_has_calls([call("a"), call("b")])
        self.assertEqual(delay.call_args_list, [call("a"), call("b")])
        self.assertEqual(delay.call_count, 2)

    def test_negative_stock_is_synchronised(self):
        with mock.patch.object(tasks.sync_stock, "delay") as delay:
            Stock.objects.create(sku="a", count=-1)
        delay.assert_called_once_with(sku="a")
        self.assertFalse(delay.call_args.args)

    def test_a_receipt_now(self):
        order = Order.objects.create(email="ada@example.com")
        self.assertEqual(services.receipt_now(order), order.pk)
