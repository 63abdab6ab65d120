"""The OpenAPI schema: valid, complete, and stable in its names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.urls import resolve
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from rest_framework.test import APIClient

from kjo_django.api.urls import urlpatterns
from tests.api.conftest import problem_of

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("get", "post", "put", "patch", "delete")

OPERATIONS = {
    "kjo_dead_letters_bulk_discard",
    "kjo_dead_letters_bulk_replay",
    "kjo_dead_letters_discard",
    "kjo_dead_letters_edit_and_replay",
    "kjo_dead_letters_groups",
    "kjo_dead_letters_list",
    "kjo_dead_letters_read",
    "kjo_dead_letters_replay",
    "kjo_health",
    "kjo_jobs_cancel",
    "kjo_jobs_change_expiry",
    "kjo_jobs_change_queue",
    "kjo_jobs_enqueue",
    "kjo_jobs_list",
    "kjo_jobs_read",
    "kjo_jobs_requeue",
    "kjo_jobs_run_now",
    "kjo_jobs_wait",
    "kjo_limits_change",
    "kjo_limits_clear",
    "kjo_limits_list",
    "kjo_limits_read",
    "kjo_metrics_handlers",
    "kjo_metrics_queues",
    "kjo_metrics_read",
    "kjo_personal_data_erase",
    "kjo_personal_data_read",
    "kjo_processed_events_lookup",
    "kjo_queues_limit",
    "kjo_queues_list",
    "kjo_queues_pause",
    "kjo_queues_read",
    "kjo_queues_resume",
    "kjo_schedules_add",
    "kjo_schedules_delete",
    "kjo_schedules_edit",
    "kjo_schedules_list",
    "kjo_schedules_pause",
    "kjo_schedules_read",
    "kjo_schedules_reset",
    "kjo_schedules_resume",
    "kjo_schedules_run_now",
    "kjo_workers_list",
    "kjo_workers_quiet",
    "kjo_workers_read",
    "kjo_workers_stop",
    "kjo_workers_unquiet",
    "kjo_workflows_cancel",
    "kjo_workflows_change_deadline",
    "kjo_workflows_list",
    "kjo_workflows_read",
    "kjo_workflows_retry",
}
"""Clients generated from the schema name their methods after these: they stay."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return SchemaGenerator(urlconf="tests.api.urls").get_schema(public=True)


@pytest.fixture(scope="module")
def operations(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, told)
        for path, methods in schema["paths"].items()
        if path.startswith("/kjo/")
        for method, told in methods.items()
        if method in METHODS
    ]


def test_the_command_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    file = tmp_path / "schema.yml"
    command = [sys.executable, "-m", "django", "spectacular", "--validate", "--fail-on-warn"]
    done = subprocess.run(
        [*command, "--file", str(file)],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.api.settings"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "kjo_jobs_enqueue" in file.read_text()


def test_it_is_valid(schema: dict[str, Any]) -> None:
    validate_schema(schema)


def test_operation_ids_are_unique_and_stay(operations: Any) -> None:
    found = [told["operationId"] for _, _, told in operations]
    assert len(found) == len(set(found))
    assert set(found) == OPERATIONS


def test_every_address_is_in_it(operations: Any) -> None:
    paths = {path for _, path, _ in operations}
    wanted = {"/kjo/" + re.sub("<str:(.+?)>", r"{\1}", str(p.pattern)) for p in urlpatterns}
    assert paths == wanted


def test_every_operation_tells_what_it_is_and_every_problem_it_may_end_with(
    operations: Any,
) -> None:
    for method, path, told in operations:
        assert told["description"], path
        assert told["tags"][0].startswith("kjo: "), path
        assert told["security"], path
        answers = told["responses"]
        assert {"400", "401", "403", "406", "429"} <= answers.keys(), path
        assert ("404" in answers) == ("{" in path), path
        assert ("415" in answers) == ("413" in answers) == (method != "get"), path
        for status, answer in answers.items():
            assert answer["description"], (path, status)
            is_problem = int(status) >= 400 and (path, status) != ("/kjo/health/", "503")
            wanted = "application/problem+json" if is_problem else "application/json"
            assert list(answer["content"]) == [wanted], (path, status)


def test_a_format_that_there_is_not_is_406_at_every_address(
    operations: Any, superuser: APIClient
) -> None:
    for method, path, _ in operations:
        row = re.sub("{.+?}", str(uuid.uuid4()), path)
        problem_of(superuser.generic(method, f"{row}?format=698337"), 406)


def test_bodies_say_that_they_take_nothing_else(schema: dict[str, Any], operations: Any) -> None:
    for _, path, told in operations:
        if "requestBody" in told:
            content = told["requestBody"]["content"]
            assert list(content) == ["application/json"], path
            name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
            component = schema["components"]["schemas"][name]
            assert component["additionalProperties"] is False, path


def test_every_name_of_ours_says_so(schema: dict[str, Any]) -> None:
    """The project has a Job of its own, and a state."""
    assert all(
        name.removeprefix("Patched").startswith("Kjo") for name in schema["components"]["schemas"]
    )


def test_parameters_of_the_address_have_their_type(operations: Any) -> None:
    for _, path, told in operations:
        for parameter in told.get("parameters", ()):
            if parameter["name"] == "id":
                assert parameter["schema"] == {"type": "string", "format": "uuid"}, path


def test_examples_are_what_the_schema_says(operations: Any) -> None:
    (enqueue,) = [told for _, _, told in operations if told["operationId"] == "kjo_jobs_enqueue"]
    examples = enqueue["requestBody"]["content"]["application/json"]["examples"]
    (example,) = examples.values()
    assert example["value"]["unique_id"] == "order-7"


def test_the_reference_lists_every_operation_with_its_permissions(operations: Any) -> None:
    page = (ROOT / "docs/reference/rest.md").read_text()
    rows = []
    for method, path, told in operations:
        view = resolve(path.replace("{", "").replace("}", ""), "tests.api.urls").func.view_class
        needed = ", ".join(f"`{name}`" for name in view.permissions[method.upper()])
        name = told["operationId"].removeprefix("kjo_")
        place = path.removeprefix("/kjo")
        answers = ", ".join(sorted(each for each in told["responses"] if each[0] == "2"))
        rows.append(f"| `{method.upper()} {place}` | `{name}` | {needed} | {answers} |")
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(missing)
    assert page.count("\n| `GET") + page.count("\n| `POST") + page.count("\n| `PATCH") == len(rows)
