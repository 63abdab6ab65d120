from unittest.mock import patch

from django.test import RequestFactory, TestCase

from catalog import views
from catalog.models import Book
from catalog.tasks import change_prices, count_view, reindex


class CatalogTests(TestCase):
    def setUp(self):
        self.book = Book.objects.create(isbn="1", title="Emma", price=100)

    @patch("catalog.tasks.import_cover.delay")
    @patch("catalog.tasks.index_book.delay")
    def test_a_book_is_added(self, index, cover):
        request = RequestFactory().post("/", {"isbn": "2", "title": "Persuasion"})
        with self.captureOnCommitCallbacks(execute=True):
            views.add(request)
        book = Book.objects.get(isbn="2")
        index.assert_called_once_with(book.pk)
        cover.assert_called_once_with(book.pk, url=None)

    @patch("catalog.views.tasks.count_view.delay")
    def test_views_are_counted(self, delay):
        views.show(RequestFactory().get("/"), self.book.pk)
        delay.assert_called_once_with(self.book.pk)
        count_view(self.book.pk)
        self.book.refresh_from_db()
        self.assertEqual(self.book.views, 1)

    @patch("catalog.tasks.index_book.delay")
    def test_prices_change(self, delay):
        change_prices(-10, isbns=["1"])
        self.book.refresh_from_db()
        self.assertEqual(self.book.price, 90)
        delay.assert_called_once_with(self.book.pk)

    @patch("catalog.tasks.change_prices.delay")
    def test_a_sale(self, delay):
        views.sale_of_all(10)
        delay.assert_called_once_with(-10)

    @patch("catalog.tasks.index_book.delay")
    def test_all_are_indexed(self, delay):
        reindex()
        delay.assert_called_with(self.book.pk)
