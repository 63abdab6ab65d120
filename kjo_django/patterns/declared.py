"""The producer classes that a project has."""

from __future__ import annotations

import inspect
from typing import Any

from django.apps import apps


def declared_producers(base: Any) -> list[Any]:
    """Return the classes derived from ``base`` in the modules of installed apps, sorted by path.

    Abstract classes and those of kjo_django, to derive from, are left out. Modules named
    ``producers`` are imported here; classes elsewhere are found once their module is imported.
    """
    found: dict[str, type] = {}
    ahead = base.__subclasses__()
    while ahead:
        each = ahead.pop()
        ahead += each.__subclasses__()
        is_reachable = "<locals>" not in each.__qualname__
        if is_reachable and not inspect.isabstract(each) and _is_installed(each):
            found[path_of(each)] = each
    return [found[path] for path in sorted(found)]


def path_of(producer: type) -> str:
    """Return the path a class is imported by."""
    return f"{producer.__module__}.{producer.__qualname__}"


def _is_installed(producer: type) -> bool:
    config = apps.get_containing_app_config(producer.__module__)
    return config is not None and config.name != "kjo_django"
