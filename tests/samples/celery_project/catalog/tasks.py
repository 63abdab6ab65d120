from celery import shared_task

from .models import Book


@shared_task(ignore_result=True)
def index_book(book_id):
    Book.objects.filter(pk=book_id).update(is_indexed=True)


@shared_task(ignore_result=True)
def remove_from_index(book_id):
    Book.objects.filter(pk=book_id).update(is_indexed=False)


@shared_task(queue="images", soft_time_limit=30)
def import_cover(book_id, url=None):
    Book.objects.filter(pk=book_id).update(has_cover=url is not None)


@shared_task(queue="low")
def count_view(book_id):
    book = Book.objects.get(pk=book_id)
    book.views += 1
    book.save(update_fields=["views"])


@shared_task
def change_prices(percent, isbns=()):
    books = Book.objects.filter(isbn__in=isbns) if isbns else Book.objects.all()
    for book in books:
        book.price = book.price * (100 + percent) // 100
        book.save(update_fields=["price"])
        index_book.delay(book.pk)


@shared_task
def reindex():
    for pk in Book.objects.values_list("pk", flat=True):
        index_book.delay(pk)
