"""The admin, and what Prometheus and load balancers ask."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("kjo/health/", include("kjo_django.contrib.health.urls")),
    path("kjo/metrics", include("kjo_django.contrib.prometheus.urls")),
]
