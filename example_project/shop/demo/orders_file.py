"""A CSV file of orders. Its shape is checked before anything is saved; its content is not."""

from __future__ import annotations

import csv
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from example_project.shop.demo.text import FileError, detect, lines

COLUMNS = {
    "invoice_number": ("InvoiceNo", "Invoice"),
    "stock_code": ("StockCode",),
    "description": ("Description",),
    "quantity": ("Quantity",),
    "invoiced_at": ("InvoiceDate",),
    "unit_price": ("UnitPrice", "Price"),
    "customer_id": ("CustomerID", "Customer ID"),
    "country": ("Country",),
}
"""The order's field → the column's names, the first being ours, the second Online Retail II's."""

Row = dict[str, str]


class OrdersFile:
    """The file's rows, to be read as often as needed; a context manager that closes it.

    :raises FileError: it cannot be opened or is not a regular file.
    """

    def __init__(self, path: Path, encoding: str | None = None, max_cell: int = 250) -> None:
        self.path = path
        self.max_cell = max_cell
        try:
            # A pipe can be read once only, and it has to be read twice: checked, then saved.
            if not stat.S_ISREG(path.stat().st_mode):
                raise FileError("not a regular file; save it as a file first")
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise FileError(f"cannot be read: {error.strerror}") from None
        self.size = path.stat().st_size
        self.encoding = detect(self._file) if encoding is None else encoding

    def __enter__(self) -> OrdersFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def check(self, progress: Callable[[int], object]) -> int:
        """Read the whole file and return its number of rows; ``progress`` is told bytes.

        :raises FileError: at the first thing that is not the shape of such a file.
        """
        count = 0
        for count, _row in enumerate(self.rows(), start=1):
            if count % 1000 == 0:
                progress(self._file.tell())
        if count == 0:
            raise FileError("a header and no rows: there is nothing to import")
        return count

    def rows(self) -> Iterator[Row]:
        """Yield the cells of each row by the order's field; blank lines are passed over."""
        records = self._records()
        header = next(records, None)
        if header is None:
            raise FileError("the file is empty")
        line, names = header
        places = _places(names, line)
        for line, cells in records:
            self._check_cells(cells, len(names), line)
            yield {field: cells[place] for field, place in places.items()}

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each record that is not blank, and the line it begins on."""
        self._file.seek(0)
        # Strict: a quotation mark out of place is an error here, not a guess at what was meant.
        reader = csv.reader(lines(self._file, self.encoding), strict=True)
        begins = 1
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise FileError(_explained(error), begins) from None
            if cells is None:
                return
            if any(cell.strip() for cell in cells):
                yield begins, cells
            begins = reader.line_num + 1

    def _check_cells(self, cells: Sequence[str], expected: int, line: int) -> None:
        if len(cells) != expected:
            raise FileError(f"{len(cells)} cells, but the header has {expected} columns", line)
        for place, cell in enumerate(cells, start=1):
            if len(cell) > self.max_cell:
                raise FileError(
                    f"cell {place} has {len(cell):,} characters, {self.max_cell} are allowed", line
                )


def _explained(error: csv.Error) -> str:
    if "new-line character" in str(error):
        return "carriage returns as line ends; save the file with line feeds"
    return f"{error}; is a quotation mark missing?"


def _places(names: Sequence[str], line: int) -> dict[str, int]:
    """Find each field's column; upper and lower case, order and further columns do not matter."""
    given = [name.strip().casefold() for name in names]
    places: dict[str, int] = {}
    missing = []
    for field, known in COLUMNS.items():
        found = [place for place, name in enumerate(given) if name in map(str.casefold, known)]
        if len(found) > 1:
            raise FileError(f"more than one column {names[found[1]].strip()!r}", line)
        if not found:
            missing.append(known[0])
        else:
            places[field] = found[0]
    if missing:
        raise FileError(_missing(missing, names), line)
    return places


def _missing(missing: Sequence[str], names: Sequence[str]) -> str:
    expected = ", ".join(known[0] for known in COLUMNS.values())
    if len(names) == 1:
        hint = "cells must be separated by commas"
    else:
        hint = f"found: {', '.join(name.strip()[:40] for name in names[:20])}"
    return f"no column {', '.join(missing)}; a file of orders has {expected} ({hint})"
