from unittest.mock import patch

from django.core import mail
from django.core.management import call_command
from django.test import TestCase

from shop import tasks
from shop.gateway import GatewayError
from shop.models import Import, Order, Stock
from shop.tasks import charge_order, send_receipt, ship


class ReceiptTests(TestCase):
    def test_it_is_mailed(self):
        order = Order.objects.create(email="ada@example.com", total=12)
        send_receipt(order.pk)
        self.assertEqual(mail.outbox[0].to, ["ada@example.com"])

    def test_a_copy_goes_to_the_books(self):
        order = Order.objects.create(email="ada@example.com", total=12)
        send_receipt(order.pk, copy=True)
        self.assertIn("books@example.com", mail.outbox[0].to)


class ChargeTests(TestCase):
    def setUp(self):
        self.order = Order.objects.create(email="ada@example.com", total=12)

    @patch("shop.tasks.send_receipt.delay")
    @patch("shop.tasks.gateway.charge")
    def test_it_is_paid(self, charge, receipt):
        self.assertEqual(charge_order(self.order.pk), "paid")
        charge.assert_called_once_with("ada@example.com", 12)
        receipt.assert_called_once_with(self.order.pk)

    @patch("shop.tasks.gateway.charge", side_effect=GatewayError)
    def test_a_failure_is_raised(self, charge):
        with self.assertRaises(Exception):
            charge_order(self.order.pk)


class WorkflowTests(TestCase):
    def setUp(self):
        self.order = Order.objects.create(email="ada@example.com", total=12)

    def test_an_order_is_shipped(self):
        tasks.fulfil(self.order.pk, "ups")
        self.order.refresh_from_db()
        self.assertEqual((self.order.state, self.order.carrier), ("shipped", "ups"))

    def test_an_order_is_priced(self):
        tasks.reprice(self.order.pk, "abc", 4)
        self.order.refresh_from_db()
        self.assertEqual(self.order.total, 17)

    def test_an_import_ends(self):
        found = tasks.import_rows("june", [{"sku": "a", "count": 1}, {"sku": "b", "count": 2}])
        found.refresh_from_db()
        self.assertEqual((found.rows, found.is_finished), (2, True))
        self.assertEqual(Import.objects.count(), 1)

    def test_shipping_is_by_dhl(self):
        Order.objects.update(state="packed")
        ship(self.order.pk)
        self.order.refresh_from_db()
        self.assertEqual(self.order.carrier, "dhl")

    @patch("shop.gateway.stock_of", return_value=9)
    def test_all_stock_is_synchronised(self, stock_of):
        call_command("sync_stock", "a", "b", together=True)
        self.assertEqual(Stock.objects.filter(count=9).count(), 2)

    @patch("shop.tasks.sync_stock.apply_async")
    def test_stock_is_synchronised_by_the_warehouse(self, apply_async):
        call_command("sync_stock", "a")
        apply_async.assert_called_once_with(["a"], queue="warehouse")
