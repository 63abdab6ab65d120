from django.db import models


class Order(models.Model):
    email = models.EmailField()
    total = models.IntegerField(default=0)
    state = models.CharField(max_length=20, default="new")
    carrier = models.CharField(max_length=20, blank=True)
    created = models.DateTimeField(auto_now_add=True)


class Stock(models.Model):
    sku = models.CharField(max_length=20, unique=True)
    count = models.IntegerField(default=0)


class Import(models.Model):
    name = models.CharField(max_length=100)
    rows = models.IntegerField(default=0)
    is_finished = models.BooleanField(default=False)
