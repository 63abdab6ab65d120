"""A file's text, line by line, from bytes nobody has promised anything about.

Memory stays constant whatever the file holds; what is no text is named by line and byte.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

CHUNK = 64 * 1024
MAX_LINE = 256 * 1024
"""Most characters of a line. Without a bound, a file without line ends would be held in memory."""

# The longer marks first: that of UTF-32 begins with that of UTF-16.
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class FileError(Exception):
    """What is wrong with the file; ``line`` tells where, if it is anywhere in particular."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def detect(file: BinaryIO) -> str:
    """Return the encoding a byte order mark announces, UTF-8 without one."""
    start = file.read(4)
    file.seek(0)
    return next((name for bom, name in _BOMS if start.startswith(bom)), "utf-8")


def lines(file: BinaryIO, encoding: str) -> Iterator[str]:
    """Yield the lines with their line ends.

    :raises FileError: at the first byte that is no text of this encoding, at a NUL character, and
        at a line no CSV file has.
    """
    # Line ends as csv knows them; str.splitlines would also split at form feeds and the like.
    number, rest = 1, ""
    for text in _decoded(file, encoding):
        if "\0" in text:
            raise FileError(
                "a NUL character: this is no text file, or one in UTF-16 without a byte order "
                "mark; if so, say --encoding utf-16-le",
                number + (rest + text[: text.index("\0")]).count("\n"),
            )
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            _check_length(line, number)
            yield line + "\n"
            number += 1
        _check_length(rest, number)
    if rest:
        yield rest


def _check_length(line: str, number: int) -> None:
    if len(line) > MAX_LINE:
        raise FileError(f"more than {MAX_LINE:,} characters on one line: this is no CSV", number)


def _decoded(file: BinaryIO, encoding: str) -> Iterator[str]:
    try:
        "".encode(encoding)  # refuses what Python has codecs for without their being encodings
        decoder = codecs.getincrementaldecoder(encoding)()
    except (LookupError, ValueError):
        raise FileError(
            f"unknown encoding {encoding!r}; try utf-8, utf-16, latin-1 or cp1252"
        ) from None
    line, read = 1, 0
    while True:
        chunk = file.read(CHUNK)
        read += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _undecodable(error, encoding, line, read) from None
        except UnicodeError as error:
            raise FileError(f"this is not {encoding} text: {error}", line) from None
        line += text.count("\n")
        yield text
        if not chunk:
            return


def _undecodable(error: UnicodeDecodeError, encoding: str, line: int, read: int) -> FileError:
    # The error knows its place in the bytes the decoder had at hand: the end of what was read.
    at = read - len(error.object) + error.start
    before = error.object[: error.start].decode(encoding, errors="replace")
    return FileError(
        f"byte {at} (0x{error.object[error.start]:02x}) is not {encoding} text. If the file is in "
        "another encoding, name it, for example --encoding latin-1; if it is no text, "
        "export it as CSV first",
        line + before.count("\n"),
    )
