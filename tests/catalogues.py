"""Catalogues of texts: what the package asks to be translated, and what the .po files say to it.

Nothing here needs the programs of gettext.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from django.utils.translation.template import templatize

import kjo_django

PACKAGE = Path(kjo_django.__file__).parent
LANGUAGES = ("de", "es")
ONE = {"_", "gettext", "gettext_lazy", "gettext_noop"}
MANY = {"ngettext", "ngettext_lazy"}
LITERAL = r"""u?('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
IN_TEMPLATES = re.compile(rf"\b(?:_|gettext)\({LITERAL}\)|\bngettext\({LITERAL}, {LITERAL},")
PLACEHOLDER = re.compile(r"%\((\w+)\)[\d.]*[a-z]|%[\d.]*[a-z%]|\{(\w+)\}")


@dataclass(slots=True)
class Entry:
    """One text of a .po file and its translations, one for each form of the plural."""

    msgid: str = ""
    plural: str | None = None
    texts: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)


def path_of(language: str, suffix: str = "po") -> Path:
    """Return where the catalogue of a language is."""
    return PACKAGE / "locale" / language / "LC_MESSAGES" / f"django.{suffix}"


def read(path: Path) -> list[Entry]:
    """Return the entries of a .po file without its header."""
    return [entry for block in path.read_text().split("\n\n") if (entry := _entry(block)).msgid]


def _entry(block: str) -> Entry:
    entry, parts = Entry(), dict[str, str]()
    name = ""
    for line in block.splitlines():
        if line.startswith("#,"):
            entry.flags |= {flag.strip() for flag in line[2:].split(",")}
        elif found := re.match(r'(msg\w+(?:\[\d\])?) (".*")$', line):
            name, parts[found[1]] = found[1], ast.literal_eval(found[2])
        elif line.startswith('"'):
            parts[name] += ast.literal_eval(line)
    entry.msgid, entry.plural = parts.pop("msgid", ""), parts.pop("msgid_plural", None)
    entry.texts = list(parts.values())
    return entry


def placeholders(text: str) -> list[str]:
    """Return the placeholders of a text, in the order of their names."""
    return sorted(found[0] for found in PLACEHOLDER.finditer(text))


# --- What the package says ------------------------------------------------------------------------


def asked_for() -> dict[str, str | None]:
    """Return every text of code and templates that is to be translated, and its plural."""
    found: dict[str, str | None] = {}
    for path in PACKAGE.rglob("*.py"):
        found |= dict(_of_code(ast.parse(path.read_text())))
    for path in PACKAGE.rglob("*.html"):
        found |= dict(_of_template(path.read_text()))
    return found


def _of_code(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        if node.func.id in ONE and texts:
            yield texts[0], None
        elif node.func.id in MANY and texts:
            yield texts[0], texts[1]


def within_f_strings(tree: ast.AST) -> Iterator[str]:
    """Yield the texts that code asks for within f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from (text for text, _plural in _of_code(node))


def _of_template(source: str) -> Iterator[tuple[str, str | None]]:
    for one, first, second in IN_TEMPLATES.findall(templatize(source)):
        if one:
            yield ast.literal_eval(one), None
        else:
            yield ast.literal_eval(first), ast.literal_eval(second)


# --- Writing --------------------------------------------------------------------------------------


def write_mo(path: Path, texts: Mapping[str, str], plural_forms: str) -> None:
    """Write a compiled catalogue.

    :param texts: translations by text; those with a plural have their forms apart by NUL, as their
        keys have.
    """
    header = f"Content-Type: text/plain; charset=UTF-8\nPlural-Forms: {plural_forms}\n"
    pairs = sorted((key.encode(), value.encode()) for key, value in {"": header, **texts}.items())
    count, offset = len(pairs), 28 + 16 * len(pairs)
    tables, data = [b"", b""], b""
    for part in (0, 1):
        for pair in pairs:
            tables[part] += struct.pack("<2I", len(pair[part]), offset + len(data))
            data += pair[part] + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + tables[0] + tables[1] + data)
