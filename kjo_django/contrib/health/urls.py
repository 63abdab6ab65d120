"""URLs of the health check, for ``include``."""

from django.urls import path

from kjo_django.contrib.health import HealthView

app_name = "kjo_health"
urlpatterns = [path("", HealthView.as_view(), name="health")]
