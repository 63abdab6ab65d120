"""The snippets of docs/how-to/personal-data.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kjo_django.management.commands.kjo_erase import Command
from kjo_django.models import Job
from kjo_django.personal_data.person import Person
from kjo_django.testing import drain
from tests.docs.test_docs import FENCE
from tests.factories import JobFactory

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/personal-data.md"
BLOCKS = [(language, code) for _, language, code in FENCE.findall(PAGE.read_text())]


def test_the_commands_and_the_request_are_read() -> None:
    for _, code in (block for block in BLOCKS if block[0] == "sh"):
        for line in code.splitlines():
            if line.startswith("curl"):
                Person.parse({"fields": json.loads(shlex.split(line)[-1])["fields"]})
                continue
            arguments = shlex.split(re.sub(r" < .*", "", line))[3:]
            options = Command().create_parser("manage.py", "kjo_erase").parse_args(arguments)
            if not options.stdin:
                Person.parse({name: getattr(options, name) for name in ("keys", "ids", "fields")})
    (request,) = (code for language, code in BLOCKS if language == "json")
    found = str(Person.parse(json.loads(request)))
    assert found == "keys (1), ids (1), the field *, the field customer.email"


@pytest.mark.django_db
def test_the_python_runs(settings: Any) -> None:
    settings.KJO = {"SERVICE_NAME": "tests", "QUEUES": {"shop": {}}, "OPERATIONS_QUEUE": "shop"}
    JobFactory(completed=True, key="customer-7")
    names: dict[str, Any] = {}
    for code in (code for language, code in BLOCKS if language == "python"):
        exec(code, names)
    assert drain().results[0]["erased"] == {}
    assert Job.objects.get(handler="tests.add").key == ""
