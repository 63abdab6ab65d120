from django.db import models


class Picture(models.Model):
    album = models.IntegerField(default=0)
    width = models.IntegerField(default=0)
    is_public = models.BooleanField(default=False)


class Video(models.Model):
    path = models.CharField(max_length=100)
    seconds = models.IntegerField(default=0)
    state = models.CharField(max_length=20, default="new")
