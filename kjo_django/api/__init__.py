"""The REST API, with Django REST framework and drf-spectacular (extra ``api``).

``path("kjo/", include("kjo_django.api.urls"))``. Views parse and show; the operations are in
``operations``. Authentication, renderers and throttling are the project's ``REST_FRAMEWORK``.
"""
