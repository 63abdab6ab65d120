from django.db import models


class Report(models.Model):
    title = models.CharField(max_length=100)
    total = models.IntegerField(default=0)
    state = models.CharField(max_length=20, default="new")
