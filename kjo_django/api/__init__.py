"""REST, with Django REST framework (extra ``api``). So far: look at one job."""
