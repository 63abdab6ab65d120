"""The Python files of a project: found, read and written."""

from __future__ import annotations

import ast
import os
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path

LARGEST = 2_000_000
"""Bytes of a file that is read; what is longer was made by a program."""
DEEPEST = 2_000
"""Levels of a file that is read. libcst ends the process somewhere beyond 5,000, of which newer
Pythons read many more."""
SKIPPED = frozenset(
    {"__pycache__", "build", "dist", "env", "migrations", "node_modules", "site-packages", "venv"}
)
"""Folders that hold none of the project's own code that could use Celery."""


class UnreadableFileError(Exception):
    """A file that no codemod can change; the text says why."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Python file as it was read."""

    path: Path
    shown_path: str
    """The path as the report shows it: from the folder that the command runs in, if it is there."""
    parts: tuple[str, ...]
    """The names of its packages and its own: of a package's ``__init__``, those of the package."""
    is_package: bool
    text: str
    """The source, with line ends as they are in the file."""
    encoding: str
    tree: ast.Module


def find(paths: Iterable[Path], exclude: Sequence[str] = ()) -> list[tuple[Path, Path]]:
    """Return the Python files in folders, each with the folder from which it is imported.

    Symbolic links in folders are not followed: what is behind them may be no part of the project.

    :param exclude: patterns such as ``legacy/*`` for paths within a folder.
    :raises ValueError: there is no such file or folder.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"There is no file or folder {path}")
        own = path.resolve()  # of a link that is named, what it leads to
        for file, root in [(own, own.parent)] if own.is_file() else _in_folder(own, exclude):
            found.setdefault(file.resolve(), _import_root(root.resolve()))
    return sorted(found.items())


def folder(path: Path) -> Path:
    """Return a folder as it is named from anywhere.

    :raises ValueError: there is none.
    """
    if not path.is_dir():
        raise ValueError(f"There is no folder {path}")
    return path.resolve()


def _in_folder(folder: Path, exclude: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    for parent, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if _is_own(Path(parent, name)))
        for name in sorted(files):
            file = Path(parent, name)
            if name.endswith(".py") and not file.is_symlink():
                inside = file.relative_to(folder).as_posix()
                if not any(fnmatch(inside, pattern) for pattern in exclude):
                    yield file, folder


def _is_own(folder: Path) -> bool:
    """Return whether a folder may hold code of the project's own."""
    name = folder.name
    is_skipped = name in SKIPPED or name.startswith(".")
    return not is_skipped and not (folder / "pyvenv.cfg").exists()


def _import_root(folder: Path) -> Path:
    """Return the first folder upwards that is no package: imports begin there."""
    while (folder / "__init__.py").exists() and folder.parent != folder:
        folder = folder.parent
    return folder


def read(path: Path, root: Path) -> SourceFile:
    """Return a file, parsed.

    :param root: the folder from which it is imported.
    :raises UnreadableFileError: it cannot be read, or is not Python that this interpreter parses.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UnreadableFileError("its name is not UTF-8") from None
    try:
        if path.stat().st_size > LARGEST:
            raise UnreadableFileError(f"it has more than {LARGEST:,} bytes")
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
        text = data.decode(encoding)
        tree = parsed(text)
    except (OSError, UnicodeError, LookupError) as error:
        raise UnreadableFileError(str(error)) from None
    except SyntaxError as error:  # of the encoding's declaration, too
        where = f"line {error.lineno}: " if error.lineno else ""
        raise UnreadableFileError(f"{where}{error.msg}") from None
    inside = path.relative_to(root).with_suffix("").parts
    is_package = inside[-1] == "__init__"
    parts = inside[:-1] if is_package else inside
    return SourceFile(path, shown(path), parts, is_package, text, encoding, tree)


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a source.

    :raises UnreadableFileError: it is nested too deeply, or holds what no source may hold.
    :raises SyntaxError: it is not Python.
    """
    try:
        tree = ast.parse(text)
    except (RecursionError, MemoryError):
        raise UnreadableFileError("it is nested too deeply") from None
    except SyntaxError:
        raise
    except ValueError as error:  # null bytes
        raise UnreadableFileError(str(error)) from None
    if _is_deeper(tree, DEEPEST):
        raise UnreadableFileError("it is nested too deeply")
    return tree


def _is_deeper(tree: ast.AST, levels: int) -> bool:
    nodes = [tree]
    for _ in range(levels):
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
        if not nodes:
            return False
    return True


def shown(path: Path) -> str:
    """Return a path as reports show it: relative to the working directory if it is below."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()


def write(contents: dict[Path, bytes]) -> None:
    """Write files: all of them to temporary ones first, so that a full disk changes none.

    :raises OSError: one cannot be written.
    """
    ready: list[tuple[str, Path]] = []
    try:
        for path, data in contents.items():
            number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            ready.append((name, path))
            with os.fdopen(number, "wb") as file:
                file.write(data)
            mode = path.stat().st_mode if path.exists() else 0o644
            Path(name).chmod(mode & 0o7777)
        while ready:
            name, path = ready[-1]
            Path(name).replace(path)
            ready.pop()
    finally:
        for name, _ in ready:
            Path(name).unlink(missing_ok=True)
