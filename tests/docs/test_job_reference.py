"""The reference of what users write says all of it: each option, attribute, method and parameter.

What there is, is asked of the objects, and not of what writes the pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

import kjo_django
from kjo_django import (
    BatchItem,
    JobContext,
    JobDefinition,
    JobHandle,
    Workflow,
    chain,
    enqueue_on_save,
    exponential,
    group,
    job,
    registry,
)
from kjo_django.enqueue.handle import JobSnapshot
from kjo_django.enqueue.job_status import Progress
from kjo_django.ids import uuid7
from kjo_django.messages.serializers import JSON
from kjo_django.states import JobStatus, WorkflowState
from kjo_django.workflows.snapshots import StepNumbers, WorkflowSnapshot
from kjo_django.workflows.step_context import StageFacts, StepOutcome, WorkflowContext
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests import docstrings, reference

pytestmark = pytest.mark.medium  # compares the pages with the code

PAGES = ("job", "using", "job-classes", "workflow-classes")
NAMES = {"JSON": JSON, "timedelta": timedelta, "timezone": timezone}
"""What the examples of options name."""


@pytest.fixture(autouse=True)
def undeclared() -> Iterator[None]:
    with registry.isolated():
        yield


def sections(page: str) -> dict[str, str]:
    """Return the text of each section of a page of the reference, by its heading."""
    text = (reference.REFERENCE / f"{page}.md").read_text()
    _, *parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


# --- Options --------------------------------------------------------------------------------------


def options_of_job() -> set[str]:
    """Return the options that ``@job`` itself says it takes."""
    with pytest.raises(TypeError) as refused:
        job(zz=1)  # type: ignore[call-overload]
    return set(str(refused.value).partition("It takes: ")[2].rstrip(".").split(", "))


def options_of_using() -> set[str]:
    with pytest.raises(TypeError) as refused:
        declared().using(zz=1)  # type: ignore[call-arg]
    return set(str(refused.value).partition("It takes: ")[2].rstrip(".").split(", "))


def declared(**options: Any) -> JobDefinition[..., Any]:
    """Return a job whose function can be called as the options ask."""
    if options.get("takes_context"):

        def with_context(context: JobContext, order_id: int = 0) -> None: ...

        return job(**options)(with_context)
    if options.get("batch"):

        def of_items(items: list[BatchItem]) -> None: ...

        return job(**options)(of_items)

    def remind(order_id: int = 0) -> None: ...

    return job(**options)(remind)


def example_in(section: str, function: str) -> dict[str, Any]:
    """Return the options of the example of a section."""
    match = re.search(rf"^Example: `{re.escape(function)}\((.+)\)`$", section, re.MULTILINE)
    assert match is not None, section
    return dict(eval(f"dict({match[1]})", NAMES))


def test_every_option_of_job_is_described_with_an_example_that_works() -> None:
    described, options = sections("job"), options_of_job()
    assert len(options) > 20
    assert options <= described.keys()
    for option in options:
        text = described[option].partition("Example: ")[0]
        assert len(text.split()) > 10, f"say what {option} does"
        example = example_in(described[option], "@job")
        assert option in example
        declared(**example)


def test_every_option_of_using_is_described_with_an_example_that_works() -> None:
    described, options = sections("using"), options_of_using()
    assert len(options) > 10
    assert options <= described.keys()
    for option in options:
        text = described[option].partition("Example: ")[0]
        assert len(text.split()) > 10, f"say what {option} does"
        example = example_in(described[option], "remind.using")
        assert option in example
        declared().using(**example)


def test_no_option_is_described_that_there_is_not() -> None:
    groups = {*reference.JOB_OPTIONS, *reference.USING_OPTIONS}
    assert sections("job").keys() - groups - {"exponential()"} == options_of_job()
    assert sections("using").keys() - groups == options_of_using()


def test_the_default_of_an_option_is_the_one_that_the_page_says() -> None:
    described = sections("job")
    options = declared().handler.options
    assert "Default: `0`." in described["priority"]
    assert options.priority == 0
    assert "Default: `True`." in described["atomic"]
    assert options.atomic is True
    assert 'Default: `"default"`.' in described["queue"]
    assert options.queue == "default"
    assert 'else `KJO["MAX_ATTEMPTS"]` (`5`).' in described["max_attempts"]


# --- Objects --------------------------------------------------------------------------------------


with registry.isolated():
    STEP = declared()


def objects() -> dict[str, tuple[str, Any]]:
    """Return the page and an object of each class of which users have objects."""
    now = timezone.now()
    workflow = Workflow("import")
    facts = StageFacts(uuid7(), "import", None, "cancel", "", None, 1, ())
    numbers = StepNumbers(1, 0, 0, 0)
    found = {
        "job-classes": (
            STEP,
            JobHandle(uuid7()),
            JobSnapshot("", JobStatus.QUEUED, now, None),
            Progress(1.0, ""),
            JobContext("", 1, 1, "", "default"),
            BatchItem("", 1, 1, "", "default"),
        ),
        "workflow-classes": (
            STEP.step(),
            chain(STEP.step()),
            group(STEP.step()),
            workflow,
            workflow.add(STEP),
            WorkflowHandle(uuid7()),
            WorkflowSnapshot("", "", None, WorkflowState.RUNNING, "", numbers, None, now, None),
            numbers,
            WorkflowContext(None, uuid7(), facts, None),
            StepOutcome(uuid7(), "", "", ""),
        ),
    }
    return {type(one).__name__: (page, one) for page, all in found.items() for one in all}


def public_names(one: Any) -> set[str]:
    """Return the public names that an object has of this package."""
    of_python = {
        name for base in type(one).__mro__ if base.__module__ == "builtins" for name in vars(base)
    }
    of_the_function = set(vars(one.handler.function)) if isinstance(one, JobDefinition) else set()
    return {name for name in dir(one) if name[0] != "_"} - of_python - of_the_function


def names_on_the_page(page: str, kind: str) -> set[str]:
    """Return the attributes and methods of a class that a page says something of."""
    found = set()
    for heading, text in sections(page).items():
        name, _, method = heading.removesuffix("()").partition(".")
        if name != kind:
            continue
        if method and without_code(text).strip():
            found.add(method)
        found |= set(re.findall(r"^\| `(\w+)` \| `.+` \| \S.+ \|$", text, re.MULTILINE))
        for line in re.findall(rf"^For {docstrings.OWN_USE}, .*: (.+)\.$", text, re.MULTILINE):
            found |= set(re.findall(r"`(\w+)`", line))
        for base in re.findall(r"^It also has what \[(\w+)\]", text, re.MULTILINE):
            found |= names_on_the_page(page, base)
    return found


@pytest.mark.parametrize("name", objects())
def test_all_that_an_object_has_is_described(name: str) -> None:
    page, one = objects()[name]
    names = public_names(one)
    assert names
    missing = names - names_on_the_page(page, name)
    assert missing == set(), "give it a docstring and run `python -m tests.reference`"


def functions() -> dict[str, Any]:
    """Return the functions and methods that users call with arguments, by their full names."""
    found = {each.__name__: each for each in (job, enqueue_on_save, exponential, chain, group)}
    found["Workflow"] = Workflow
    for name, (_, one) in objects().items():
        for each in sorted(public_names(one)):
            function = getattr(type(one), each, None)
            text = " ".join((function.__doc__ or "").split()) if callable(function) else ""
            if callable(function) and docstrings.OWN_USE not in text:
                found[f"{name}.{each}"] = function
    return found


@pytest.mark.parametrize("name", functions())
def test_every_parameter_has_a_text(name: str) -> None:
    function = functions()[name]
    texts = docstrings.read(function.__doc__)
    if texts.paragraphs[0].startswith("`enqueue` from asynchronous code"):
        return  # which takes what the other one takes
    named = {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert named - {"self", "cls", "function"} <= texts.params.keys()
    assert all(texts.params.values())


def test_the_public_names_for_jobs_are_in_the_reference() -> None:
    text = "\n".join((reference.REFERENCE / f"{page}.md").read_text() for page in PAGES)
    rooms = ("kjo_django.enqueue.", "kjo_django.engine.", "kjo_django.workflows.")
    names = [
        name
        for name in kjo_django.__all__
        if getattr(kjo_django, name).__module__.startswith(rooms)
    ]
    assert len(names) > 7
    assert not [name for name in names if not re.search(rf"^## {name}\b|`@?{name}\b", text, re.M)]
