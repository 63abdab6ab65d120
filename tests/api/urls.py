from django.urls import include, path
from drf_spectacular.views import SpectacularJSONAPIView

urlpatterns = [
    path("kjo/", include("kjo_django.api.urls")),
    path("schema/", SpectacularJSONAPIView.as_view(), name="schema"),
]
