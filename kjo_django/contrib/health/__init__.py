"""``/health`` for load balancers and monitors (KII-35, RST-31).

urlpatterns = [path("kjo/health/", include("kjo_django.contrib.health.urls"))]
"""
