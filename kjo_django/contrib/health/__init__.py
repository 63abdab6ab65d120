"""``/health`` for load balancers and monitors.

urlpatterns = [path("kjo/health/", include("kjo_django.contrib.health.urls"))]
"""
