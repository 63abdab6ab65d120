from django.conf import settings
from django.db import models


class Profile(models.Model):
    user = models.OneToOneField(settings.AUTH_USER_MODEL, models.CASCADE)
    points = models.IntegerField(default=0)
    is_merged = models.BooleanField(default=False)
