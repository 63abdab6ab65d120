"""What the page about workflows shows does what it says."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from kjo_django.testing import drain
from tests.docs.test_docs import FENCE

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/workflows.md"


@pytest.mark.django_db
def test_the_snippets_of_the_page_run(forgotten_definitions: None) -> None:
    # Given
    text = PAGE.read_text().replace("range(500)", "range(5)")
    blocks = [code for _, language, code in FENCE.findall(text) if language == "python"]
    names: dict[str, Any] = {"__name__": "tests.unit.workflows.page"}
    handles = []
    # When
    for block in blocks:
        exec(compile(textwrap.dedent(block), str(PAGE), "exec"), names)
        handles.append(names.get("handle"))
    drain()
    # Then
    chained, imported, split_up = handles[1], handles[3], names["split_up"]
    assert chained.result == 2
    assert imported.result == {"rows": 2000, "failed": 0}
    assert split_up.result == {"rows": 300, "failed": 0}
    assert names["handle"].status == "completed"
