"""``path("kjo/", include("kjo_django.api.urls"))``."""

from __future__ import annotations

from django.urls import path

from kjo_django.api.views import job_detail

app_name = "kjo_django_api"
urlpatterns = [path("jobs/<uuid:id>/", job_detail, name="job")]
