"""Metrics for Prometheus, in its text format and without its client (KJO-102).

urlpatterns = [path("kjo/metrics", include("kjo_django.contrib.prometheus.urls"))]
"""
