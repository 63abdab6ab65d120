from django.db import models


class Book(models.Model):
    isbn = models.CharField(max_length=13, unique=True)
    title = models.CharField(max_length=100)
    price = models.IntegerField(default=0)
    views = models.IntegerField(default=0)
    is_indexed = models.BooleanField(default=False)
    has_cover = models.BooleanField(default=False)
