"""REST, with Django REST framework and drf-spectacular (extra ``api``).

``path("kjo/", include("kjo_django.api.urls"))``. Views parse and show; what they do is in
``operations``. Authentication, renderers and throttling are the project's ``REST_FRAMEWORK``.
"""
