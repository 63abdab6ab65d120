"""URLs of the metrics, for ``include``."""

from django.urls import path

from kjo_django.contrib.prometheus import MetricsView

app_name = "kjo_prometheus"
urlpatterns = [path("", MetricsView.as_view(), name="metrics")]
