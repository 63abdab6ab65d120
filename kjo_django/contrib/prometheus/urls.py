"""``include`` it where Prometheus is to scrape."""

from django.urls import path

from kjo_django.contrib.prometheus import MetricsView

app_name = "kjo_prometheus"
urlpatterns = [path("", MetricsView.as_view(), name="metrics")]
