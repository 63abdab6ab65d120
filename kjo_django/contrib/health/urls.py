"""``include`` it where the health of the jobs is to be asked."""

from django.urls import path

from kjo_django.contrib.health import HealthView

app_name = "kjo_health"
urlpatterns = [path("", HealthView.as_view(), name="health")]
