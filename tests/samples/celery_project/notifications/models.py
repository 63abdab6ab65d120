from django.db import models


class Notice(models.Model):
    user = models.IntegerField()
    text = models.CharField(max_length=200)
    badge = models.IntegerField(default=0)
    created = models.DateTimeField(auto_now_add=True)
