"""The transport and the coordination that the documentation shows in full pass the suites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kjo_django.testing.coordination_conformance")

PAGES = Path(__file__).resolve().parents[2] / "docs/how-to"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example(page: str, module: str) -> dict[str, Any]:
    """Run a page's module and its tests, and return the names they define."""
    blocks = dict(BLOCK.findall((PAGES / page).read_text()))
    code = blocks[f"shop/{module}.py"] + blocks[f"shop/tests/test_{module}.py"]
    names: dict[str, Any] = {"__name__": __name__}
    own_import = re.compile(rf"^from shop\.{module} import .*$", re.MULTILINE)
    exec(compile(own_import.sub("", code), page, "exec"), names)
    return names


TestFileTransport = example("write-a-transport.md", "file_transport")["TestFileTransport"]
TestProcessCoordination = example("write-a-coordination.md", "process_coordination")[
    "TestProcessCoordination"
]
