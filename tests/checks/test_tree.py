"""The tests' tree is the package's: who changes a module finds its tests by its path.

Tests of ``kjo_django/engine/group.py`` are in ``tests/unit/engine``, in ``test_group.py`` or in
files whose names begin with that, as ``test_group_crashes.py``. Tests of a package as a whole are
within its folder and have its name: ``tests/unit/store/test_store.py``.

Tests of pages (``tests/docs``), of rules for the repository (``tests/repository``,
``tests/checks``), of the tests' own tools (beside these) and of whole behaviours (``acceptance``,
``conformance``, ``faults`` and others) have folders of their own.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

import pytest

import kjo_django

pytestmark = pytest.mark.small  # reads files

PACKAGE = Path(kjo_django.__file__).parent
UNIT = Path(__file__).resolve().parents[1] / "unit"
COMMON = {"", "conf", "exceptions", "models", "registry", "runtime", "signals", "states", "testing"}
"""Modules that tests of all others use: what they import of these says nothing of their place."""


def modules_of(package: Path) -> dict[PurePath, set[str]]:
    """Return, by the path of each package, the names that its tests may begin with: those of its
    modules, and its own."""
    found: dict[PurePath, set[str]] = {}
    for path in package.rglob("*.py"):
        inside = path.relative_to(package)
        if "migrations" in inside.parts:
            continue
        is_package = path.stem == "__init__"
        name = inside.parent.name or package.name
        found.setdefault(inside.parent, set()).add(name if is_package else path.stem)
    return found


def module_of(stem: str, modules: Iterable[str]) -> str | None:
    """Return the module that a test file with this name tests, None if it is none of these."""
    return max((name for name in modules if f"{stem}_".startswith(f"test_{name}_")), default=None)


def misplaced(tests: Iterable[PurePath], modules: dict[PurePath, set[str]]) -> Iterator[PurePath]:
    """Yield the paths of test files, below the folder of unit tests, that match no module."""
    for path in tests:
        if module_of(path.stem, modules.get(path.parent, ())) is None:
            yield path


def places_for(path: PurePath, code: str, modules: dict[PurePath, set[str]]) -> list[str]:
    """Return where a misplaced file may belong, the likeliest first: by its name, else by what it
    imports."""
    by_name = [folder / path.name for folder in modules if module_of(path.stem, modules[folder])]
    by_import = [beside(name, modules) for name, _ in uses(ast.parse(code)).most_common(3)]
    return [f"tests/unit/{place.as_posix()}" for place in by_name or by_import]


def beside(module: str, modules: dict[PurePath, set[str]]) -> PurePath:
    """Return the path of the tests of a module; of a package, within its folder."""
    path = PurePath(*module.split("."))
    return (path if path in modules else path.parent) / f"test_{path.name}.py"


def uses(tree: ast.Module) -> Counter[str]:
    """Return how often a module names what it imports of each module of the package."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            module = ".".join((node.module or "").split(".")[1:])
            for alias in node.names:
                inner = f"{module}.{alias.name}".lstrip(".")
                path = PACKAGE.joinpath(*inner.split("."))
                is_module = path.is_dir() or path.with_suffix(".py").is_file()
                origins[alias.asname or alias.name] = inner if is_module else module
    named = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    found = Counter(origins[name] for name in named if name in origins)
    return Counter(
        {name: count for name, count in found.items() if name.split(".")[0] not in COMMON}
    )


def test_every_unit_test_stands_at_the_path_of_its_module() -> None:
    modules = modules_of(PACKAGE)
    files = [path.relative_to(UNIT) for path in sorted(UNIT.rglob("test_*.py"))]
    wrong = {
        f"tests/unit/{path.as_posix()}": places_for(path, (UNIT / path).read_text(), modules)
        for path in misplaced(files, modules)
    }
    assert wrong == {}, "no module is at these paths; the places that are named are likely ones"
    assert len(files) > 100, "it finds some"


# --- What is found --------------------------------------------------------------------------------

MODULES = {
    PurePath(): {"kjo_django", "clock", "conf"},
    PurePath("engine"): {"engine", "group", "leases"},
    PurePath("engine/runners"): {"runners", "lane", "loop"},
    PurePath("outbox"): {"outbox", "relay"},
}


@pytest.mark.parametrize(
    ("path", "is_found"),
    [
        ("test_clock.py", False),
        ("engine/runners/test_loop.py", False),
        ("engine/runners/test_loop_cancelling.py", False),
        ("outbox/test_outbox.py", False),
        ("test_turns.py", True),
        ("test_loop.py", True),
        ("engine/test_loop.py", True),
        ("engine/test_loops.py", True),
        ("engine/test_leasesbook.py", True),
        ("pipeline/test_group.py", True),
        ("test_outbox.py", True),
    ],
)
def test_a_file_is_misplaced_if_no_module_stands_at_its_path(path: str, is_found: bool) -> None:
    assert [*misplaced([PurePath(path)], MODULES)] == [PurePath(path)] * is_found


def test_it_is_said_where_a_file_belongs_by_its_name() -> None:
    found = places_for(PurePath("test_loop_cancelling.py"), "", MODULES)
    assert found == ["tests/unit/engine/runners/test_loop_cancelling.py"]


def test_it_is_said_where_a_file_of_another_name_belongs_by_what_it_imports() -> None:
    code = (
        "from kjo_django.engine.leases import LeaseBook\n"
        "from kjo_django.models import Job\n"
        "from kjo_django.outbox.relay import Relay\n"
        "from kjo_django.engine import runners\n"
        "Relay(); Relay(LeaseBook()); Job(); Job(); Job(); Job(); runners"
    )
    found = places_for(PurePath("test_turns.py"), code, MODULES)
    assert found[0] == "tests/unit/outbox/test_relay.py"
    assert "tests/unit/engine/test_leases.py" in found


def test_packages_have_their_modules_and_their_own_name() -> None:
    modules = modules_of(PACKAGE)
    assert {"kjo_django", "clock", "conf"} <= modules[PurePath()]
    assert {"runners", "lane", "loop"} == modules[PurePath("engine/runners")]
