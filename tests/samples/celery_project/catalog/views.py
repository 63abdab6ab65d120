from django.db import transaction
from django.http import HttpResponse

from . import tasks
from .models import Book


def show(request, pk):
    tasks.count_view.delay(pk)
    return HttpResponse(Book.objects.get(pk=pk).title)


def add(request):
    with transaction.atomic():
        book = Book.objects.create(isbn=request.POST["isbn"], title=request.POST["title"])
        transaction.on_commit(lambda: tasks.index_book.delay(book.pk))
        transaction.on_commit(
            lambda: tasks.import_cover.delay(
                book.pk,
                url=request.POST.get("cover"),
            )
        )
    return HttpResponse(book.pk)


def remove(request, pk):
    tasks.remove_from_index.delay(pk)
    return HttpResponse()


def sale(percent, isbns):
    tasks.change_prices.apply_async((-percent,), {"isbns": isbns}, countdown=5)


def sale_of_all(percent):
    tasks.change_prices.delay(-percent)


def rebuild():
    tasks.reindex.delay()
    tasks.reindex.apply_async(countdown=60)


def recover(pk):
    tasks.import_cover.apply_async(args=[pk], kwargs={"url": "https://example.com"}, queue="low")
