"""Metrics for Prometheus, in its text format and without its client.

urlpatterns = [path("kjo/metrics", include("kjo_django.contrib.prometheus.urls"))]
"""
