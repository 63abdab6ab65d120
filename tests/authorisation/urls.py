from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("kjo/", include("kjo_django.api.urls")),
]
