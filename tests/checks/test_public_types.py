"""What pyright knows of the public names: all of it, or users see ``Unknown`` where they use one.

PyPI's ``pyright`` brings the npm package along, and its extra Node.js: nothing is downloaded here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kjo_django

COMPLETENESS = ("--verifytypes", "kjo_django", "--ignoreexternal", "--outputjson")
TYPED_JOBS = Path(__file__).with_name("typed_jobs.py")


def asked(folder: Path, *options: str) -> dict[str, Any]:
    """Return what pyright answers, run in a folder."""
    if importlib.util.find_spec("pyright") is None and not os.environ.get("CI"):
        pytest.skip("pyright is not installed: pip install --group release")
    # It looks for the package where the first Python of PATH would import it from.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", *options],
        cwd=folder,  # without the repository's other files
        env={**os.environ, "PATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.lstrip().startswith("{"), f"{done.stdout}\n{done.stderr}"
    return dict(json.loads(done.stdout))


def completeness(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what pyright says of each symbol of the package, by its full name."""
    found = asked(folder, *COMPLETENESS)["typeCompleteness"]
    return {symbol["name"]: symbol for symbol in found["symbols"]}


@pytest.mark.large  # needs Node.js, 200 MB of it; tests/checks/test_static.py has mypy
@pytest.mark.timeout(600)
def test_the_types_of_all_public_names_are_complete(tmp_path: Path) -> None:
    symbols = completeness(tmp_path)
    # Given each public name, and what it has: methods and attributes
    whole = {f"kjo_django.{name}": name for name in kjo_django.__all__}
    homes = {path: name for name, path in homes_of_public_names().items()}
    assert whole.keys() <= symbols.keys()
    # Then no type of theirs is unknown, or inferred in the way of one checker
    incomplete = {
        full: [each["message"] for each in symbol["diagnostics"]]
        for full, symbol in symbols.items()
        if (full in whole or any(full == home or full.startswith(f"{home}.") for home in homes))
        and not (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"])
    }
    assert incomplete == {}


def homes_of_public_names() -> dict[str, str]:
    """Return the full name that each public name has in its own module."""
    return {
        name: f"{found.__module__}.{name}"
        for name in kjo_django.__all__
        if hasattr(found := getattr(kjo_django, name), "__module__")
    }


@pytest.mark.large  # as above; mypy reads the file in tests/checks/test_static.py
@pytest.mark.timeout(600)
def test_misuse_is_an_error_and_use_is_none(tmp_path: Path) -> None:
    """In ``typed_jobs.py`` each misuse has an ignore, and an ignore without an error is one."""
    settings = {"reportUnnecessaryTypeIgnoreComment": "error", "include": ["typed_jobs.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "typed_jobs.py").write_text(TYPED_JOBS.read_text())
    found = asked(tmp_path, "--outputjson")
    assert found["summary"]["filesAnalyzed"] == 1
    assert [
        f"{each['range']['start']['line'] + 1}: {each['message']}"
        for each in found["generalDiagnostics"]
        if each["severity"] == "error"
    ] == []
