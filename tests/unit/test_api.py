"""REST: PJQ-07, RST-01, and the progress of issue 4."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.test import RequestFactory

from kjo_django.backends import get_coordination
from kjo_django.consumer.running import dump_progress, progress_name
from kjo_django.messages.serializers import dump_result
from tests.factories import JobFactory

pytest.importorskip("rest_framework")
pytestmark = pytest.mark.django_db


def look(id, *codenames):
    from kjo_django.api.views import job_detail

    user = User.objects.create_user(f"user-{uuid.uuid4().hex}")
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    request = RequestFactory().get("/")
    from rest_framework.test import force_authenticate

    force_authenticate(request, user)
    return job_detail(request, id=id)


def test_a_jobs_status_and_progress_are_shown_to_whoever_may_see_jobs():
    # Given a job that says how far it is
    job = JobFactory(state="queued")
    get_coordination().set_marks(
        {progress_name(str(job.pk)): dump_progress(42, "resizing")}, timedelta(minutes=1)
    )
    # When
    answer = look(job.pk, "view_job")
    # Then
    assert answer.status_code == 200
    assert answer.data["status"] == "queued"
    assert answer.data["progress"] == {"percent": 42, "text": "resizing"}
    assert "result" not in answer.data


def test_a_result_needs_the_permission_for_payloads():
    job = JobFactory(state="completed", result=dump_result({"a": 1}))
    assert "result" not in look(job.pk, "view_job").data
    assert look(job.pk, "view_job", "view_payload").data["result"] == {"a": 1}


def test_nobody_else_sees_anything():
    job = JobFactory()
    assert look(job.pk).status_code == 403


def test_a_job_that_is_not_there_is_404():
    assert look(uuid.uuid4(), "view_job").status_code == 404
