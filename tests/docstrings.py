"""What docstrings and annotations of the package say, as Markdown: `tests/reference.py` writes it.

An option or an attribute is documented where it is declared: by a ``:param`` of the function that
takes it, by a property's docstring, or by the string behind an attribute. What says that it is for
this package's own use is named on the page and not described.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

OWN_USE = "this package's own use"
"""Said of what has a public name and is nothing for users."""
LINE_LENGTH = 100
"""As ruff is told, which formats the code in pages, too."""
FIELD = re.compile(r":(param|raises) (\w+):\s*")
EXAMPLE = re.compile(r"\s*Example: ``([^`]+)``\.$")


@dataclass
class Text:
    """A docstring, taken apart."""

    paragraphs: list[str]
    params: dict[str, str] = field(default_factory=dict)
    raises: list[tuple[str, str]] = field(default_factory=list)


def markdown(text: str) -> str:
    """Return a text on one line, with Markdown's mark of code."""
    return " ".join(text.replace("``", "`").split())


def read(docstring: str | None) -> Text:
    """Return what a docstring says."""
    cleaned = inspect.cleandoc(docstring or "")
    body, *fields = re.split(r"^(?=:(?:param|raises) )", cleaned, flags=re.MULTILINE)
    found = Text([markdown(paragraph) for paragraph in body.split("\n\n") if paragraph.strip()])
    for each in fields:
        match = FIELD.match(each)
        assert match is not None, f"neither :param nor :raises: {each}"
        text = " ".join(each[match.end() :].split())
        if match[1] == "param":
            found.params[match[2]] = text
        else:
            found.raises.append((match[2], markdown(text)))
    return found


def split_example(text: str) -> tuple[str, str]:
    """Return the text of an option, and its example as Python."""
    match = EXAMPLE.search(text)
    assert match is not None, f"it ends with no 'Example: ``…``.': {text}"
    written = markdown(text[: match.start()])
    return written[0].upper() + written[1:], match[1]


# --- Classes --------------------------------------------------------------------------------------


@dataclass
class Attribute:
    """An attribute or a property of a class."""

    type: str
    text: str


def attributes(kind: type[Any]) -> dict[str, Attribute]:
    """Return the public attributes and properties of a class, those of its bases first."""
    found: dict[str, Attribute] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("kjo_django"):
            found |= _declared(each)
    return found


def _declared(kind: type[Any]) -> dict[str, Attribute]:
    """Return what the source of a class declares: on the class, and on ``self`` when it is made."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, Attribute] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found |= _assigned(node.body, ast.Attribute)
        elif isinstance(node, ast.FunctionDef) and isinstance(vars(kind)[node.name], property):
            returned = ast.unparse(node.returns) if node.returns is not None else ""
            found[node.name] = Attribute(
                returned, " ".join(read(ast.get_docstring(node)).paragraphs)
            )
    found |= _assigned(tree.body, ast.Name)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in found:  # another name
            (target,) = node.targets
            found[ast.unparse(target)].type = found[ast.unparse(node.value)].type
    return {name: each for name, each in found.items() if not name.startswith("_")}


def _assigned(body: list[ast.stmt], kind: type[ast.Name | ast.Attribute]) -> dict[str, Attribute]:
    """Return the attributes that statements assign or declare, with the strings behind these.

    :param kind: how an attribute is named there: by itself, or as one of ``self``.
    """
    found = {}
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, kind):
            name = target.attr if isinstance(target, ast.Attribute) else target.id
            annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            found[name] = Attribute(annotation, _string(behind))
    return found


def _string(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return markdown(str(node.value.value)) if is_text else ""


def methods(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class, and how it is called, in the order of the source."""
    found: dict[str, Callable[..., Any]] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("kjo_django"):
            for name, value in vars(each).items():
                function = getattr(value, "__func__", value)  # of a classmethod
                if inspect.isfunction(function) and (name[0] != "_" or name == "__call__"):
                    found[name] = value
    return found


# --- Writing --------------------------------------------------------------------------------------


def signature(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """Yield a function's signature as a block of Python."""
    plain = getattr(function, "__func__", function)
    given = inspect.signature(plain)
    parts, has_star = [], False
    parameters = list(given.parameters.values())
    for number, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        has_star = has_star or parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_written(parameter))
        follows = parameters[number + 1].kind if number + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and follows is not parameter.kind:
            parts.append("/")
    returned = "" if given.return_annotation is given.empty else f" -> {given.return_annotation}"
    start = "async def" if inspect.iscoroutinefunction(plain) else "def"
    line = f"{start} {name}({', '.join(parts)}){returned}: ..."
    yield "```python"
    if isinstance(function, classmethod):
        yield "@classmethod"
    if inspect.isgeneratorfunction(getattr(plain, "__wrapped__", None)):
        yield "@contextmanager"
    if len(line) <= LINE_LENGTH:
        yield line
    else:
        yield f"{start} {name}("
        yield from (f"    {part}," for part in parts)
        yield f"){returned}: ..."
    yield "```"


def _written(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    # Of a Literal, Python keeps the annotation with other quotes than ruff wants in pages.
    wanted = str(parameter.annotation).replace("'", '"')
    annotation = "" if parameter.annotation is parameter.empty else f": {wanted}"
    default = parameter.default
    if default is parameter.empty:
        return f"{stars}{parameter.name}{annotation}"
    default = default.value if isinstance(default, Enum) else default
    if repr(default).startswith("<"):  # an object without a literal, or made anew for each call
        return f"{stars}{parameter.name}{annotation} = ..."
    value = json.dumps(default) if isinstance(default, str) else repr(default)
    return f"{stars}{parameter.name}{annotation}{' = ' if annotation else '='}{value}"


def function_lines(name: str, function: Callable[..., Any], elsewhere: str = "") -> Iterator[str]:
    """Yield what a function takes, does and raises.

    :param elsewhere: says where its parameters are described, if that is not here.
    """
    text = read(function.__doc__)
    if elsewhere:
        text.paragraphs.append(elsewhere)
        text.params.clear()
    yield from signature(name, function)
    yield ""
    yield from text_lines(text)


def text_lines(text: Text) -> Iterator[str]:
    """Yield the paragraphs of a docstring, its parameters and what is raised."""
    for paragraph in text.paragraphs:
        yield paragraph
        yield ""
    if text.params:
        yield from (f"- `{name}`: {markdown(each)}" for name, each in text.params.items())
        yield ""
    if text.raises:
        yield "Raises:"
        yield ""
        yield from (f"- `{name}`: {each}" for name, each in text.raises)
        yield ""


def class_lines(
    kind: type[Any],
    table: Callable[..., Iterator[str]],
    without: type[Any] | None = None,
    elsewhere: Mapping[str, str] | None = None,
    options: tuple[str, Sequence[str]] | None = None,
    is_constructed: bool = False,
) -> Iterator[str]:
    """Yield what a class has.

    :param table: writes a table, of its head and rows.
    :param without: a base that is described before.
    :param elsewhere: by the name of a method, where its parameters are described.
    :param options: a heading of the same page with a table of options, and the attributes that are
        described there.
    :param is_constructed: say how an object is made.
    """
    name = kind.__name__
    yield f"## {name}"
    yield ""
    if is_constructed:
        yield from signature("__init__", kind.__init__)
        yield ""
    yield from text_lines(read(kind.__doc__))
    if without is not None:
        base = without.__name__
        yield f"It also has what [{base}](#{base.lower()}) has."
        yield ""
    before = {*attributes(without), *methods(without)} if without is not None else set()
    values = {key: each for key, each in attributes(kind).items() if key not in before}
    calls = {key: each for key, each in methods(kind).items() if key not in before}
    own = [key for key, each in values.items() if OWN_USE in each.text]
    own += [key for key, each in calls.items() if OWN_USE in " ".join((each.__doc__ or "").split())]
    heading, in_table = options or ("", ())
    is_enum = issubclass(kind, Enum)
    if rows := [
        (f"`{key}`", f"`{kind[key].value if is_enum else each.type}`", each.text)
        for key, each in values.items()
        if key not in own and key not in in_table
    ]:
        head = ("Member", "Value") if is_enum else ("Attribute", "Type")
        yield from table((*head, "Meaning"), rows)
        yield ""
    if in_table:
        anchor = heading.lower().replace(" ", "-")
        names = ", ".join(f"`{key}`" for key in in_table)
        yield f"In the table of [{heading.lower()}](#{anchor}): {names}."
        yield ""
    for key, function in calls.items():
        if key not in own:
            yield f"### {name}()" if key == "__call__" else f"### {name}.{key}()"
            yield ""
            yield from function_lines(key, function, (elsewhere or {}).get(key, ""))
    if own:
        yield f"For {OWN_USE}, and changed without notice: {', '.join(f'`{key}`' for key in own)}."
        yield ""
