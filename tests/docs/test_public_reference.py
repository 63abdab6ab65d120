"""Every public name is in the reference, with each attribute, method and parameter of a class.

What there is, is asked of the modules and classes, and not of what writes the pages.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import kjo_django
from kjo_django import exceptions, kdlq, queue, testing
from tests import docstrings, public_classes, reference

pytestmark = pytest.mark.medium  # compares the pages with the code

MODULES = {module.__name__: module for module in (kjo_django, queue, kdlq, testing)}
NAMES = [f"{place}.{name}" for place, module in MODULES.items() for name in module.__all__]
DESCRIBED: dict[str, Any] = {
    one.__name__: one for block in public_classes.BLOCKS for one in public_classes.described(block)
}
CLASSES = [name for name, one in DESCRIBED.items() if isinstance(one, type)]
OF_PYTHON = {name for base in (object, str, enum.StrEnum) for name in dir(base)}


@cache
def sections() -> dict[str, str]:
    """Return the text of each section of all pages of the reference, by its heading."""
    found: dict[str, str] = {}
    for page in reference.pages():
        _, *parts = re.split(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    place, _, short = name.rpartition(".")
    one = getattr(MODULES[place], short)
    if isinstance(one, type):
        assert {one.__name__, f"{one.__name__}()"} & sections().keys()
    elif callable(one):
        assert {f"{short}()", f"Options of @{short}"} & sections().keys()
    else:
        assert any(f"`{short}`" in text for text in sections().values())


def test_every_exception_of_the_package_is_described() -> None:
    errors = {one.__name__ for one in vars(exceptions).values() if is_error(one)}
    assert len(errors) > 20
    assert {name for name in errors if len(sections().get(name, "").split()) < 4} == set()


def is_error(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, exceptions.KjoError)


# --- Classes and functions ------------------------------------------------------------------------


def public_names(kind: type[Any]) -> set[str]:
    """Return the public names of a class, and those that its constructor sets."""
    return {name for name in {*dir(kind), *docstrings.attributes(kind)} if name[0] != "_"}


def described(heading: str) -> set[str]:
    """Return the attributes and methods of which a section, or one of a method, says something."""
    found: set[str] = set()
    for other, text in sections().items():
        name, _, method = other.removesuffix("()").partition(".")
        if name != heading:
            continue
        if method and re.sub(r"```.*?```", "", text, flags=re.DOTALL).strip():
            found.add(method)
        found |= set(re.findall(r"^\| `(\w+)` \| `.+` \| \S.* \|$", text, re.MULTILINE))
        for line in re.findall(r"^(?:For this|In the table of) .*: (.+)\.$", text, re.MULTILINE):
            found |= set(re.findall(r"`(\w+)`", line))
        for base in re.findall(r"^It also has what \[(\w+)\]", text, re.MULTILINE):
            found |= described(base)
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_all_that_a_class_has_is_described(name: str) -> None:
    names = public_names(DESCRIBED[name]) - OF_PYTHON
    missing = names - described(name)
    assert missing == set(), "give it a docstring and run `python -m tests.reference`"


def functions() -> dict[str, Callable[..., Any]]:
    """Return what users call of what is described, by its full name; of a class that has a base
    among the described ones, what it has beyond that."""
    found: dict[str, Callable[..., Any]] = {}
    for name, one in DESCRIBED.items():
        if not isinstance(one, type):
            found[name] = one
            continue
        if name in public_classes.CONSTRUCTED:
            found[name] = one
        bases = [each for each in one.__mro__[1:] if each.__name__ in CLASSES]
        known = {each for base in bases for each in docstrings.methods(base)}
        for each in docstrings.methods(one).keys() - known:
            found[f"{name}.{each}"] = getattr(one, each)
    return found


@pytest.mark.parametrize("name", sorted(functions()))
def test_every_parameter_has_a_text(name: str) -> None:
    function = functions()[name]
    texts = docstrings.read(inspect.getdoc(function))
    assert texts.paragraphs
    if re.match(r"`\w+` (from asynchronous code|as a decorator)", texts.paragraphs[0]):
        return  # which takes what the other one takes
    of_class = DESCRIBED[name.partition(".")[0]]
    # What a class says of the arguments of its methods, and of its attributes, which its
    # constructor takes by their names.
    known = {*texts.params, *docstrings.read(of_class.__doc__).params}
    if isinstance(function, type):
        known |= {key for key, each in docstrings.attributes(function).items() if each.text}
    missing = public_classes.parameters(function) - known
    assert missing == set()
