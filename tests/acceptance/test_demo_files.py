"""Which files the demo takes, and what it says about the others."""

from pathlib import Path

import pytest

from example_project.shop.demo.orders_file import OrdersFile
from example_project.shop.demo.text import FileError

pytestmark = pytest.mark.medium  # quick, of a folder that is not

HEADER = "InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"
ROW = "539761,20705,MRS ROBOT SOFT TOY,8,2010-12-22 10:29:00,1.95,17593.0,United Kingdom"
FILE = f"{HEADER}\n{ROW}\n"


def read(path: Path, content: bytes | str, encoding: str | None = None) -> list[dict[str, str]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with OrdersFile(path, encoding) as file:
        file.check(lambda done: None)
        return list(file.rows())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.csv"


READABLE = {
    "as documented": FILE,
    "a byte order mark": b"\xef\xbb\xbf" + FILE.encode(),
    "UTF-16 with a byte order mark": FILE.encode("utf-16"),
    "UTF-16, big end first": b"\xfe\xff" + FILE.encode("utf-16-be"),
    "UTF-32 with a byte order mark": FILE.encode("utf-32"),
    "Windows line ends": FILE.replace("\n", "\r\n"),
    "no line end at the end": FILE.rstrip("\n"),
    "blank lines": f"\n{HEADER}\n\n{ROW}\n\n\n",
    "upper case and blanks in the header": FILE.replace(HEADER, HEADER.upper().replace(",", " , ")),
    "the column names of Online Retail II": FILE.replace("InvoiceNo", "Invoice")
    .replace("UnitPrice", "Price")
    .replace("CustomerID", "Customer ID"),
    "quoted cells": "\n".join(
        ",".join(f'"{cell}"' for cell in line.split(",")) for line in (HEADER, ROW)
    ),
}


@pytest.mark.parametrize("content", READABLE.values(), ids=READABLE.keys())
def test_a_file_of_orders_is_read(path: Path, content: bytes | str) -> None:
    assert read(path, content) == [
        {
            "invoice_number": "539761",
            "stock_code": "20705",
            "description": "MRS ROBOT SOFT TOY",
            "quantity": "8",
            "invoiced_at": "2010-12-22 10:29:00",
            "unit_price": "1.95",
            "customer_id": "17593.0",
            "country": "United Kingdom",
        }
    ]


def test_columns_come_in_any_order_and_others_are_ignored(path: Path) -> None:
    header = "Note," + ",".join(reversed(HEADER.split(",")))
    row = "whatever," + ",".join(reversed(ROW.split(",")))

    (order,) = read(path, f"{header}\n{row}\n")

    assert (order["invoice_number"], order["country"]) == ("539761", "United Kingdom")


def test_a_quoted_cell_may_hold_commas_quotation_marks_and_line_ends(path: Path) -> None:
    row = ROW.replace("MRS ROBOT SOFT TOY", '"ROBOT, 6"" HIGH\nAND SOFT"')

    orders = read(path, f"{HEADER}\n{row}\n{ROW}\n")

    assert [order["description"] for order in orders] == [
        'ROBOT, 6" HIGH\nAND SOFT',
        "MRS ROBOT SOFT TOY",
    ]


def test_a_named_encoding_is_used(path: Path) -> None:
    content = FILE.replace("ROBOT", "CAFÉ").encode("latin-1")

    (order,) = read(path, content, encoding="latin-1")

    assert order["description"] == "MRS CAFÉ SOFT TOY"


def test_characters_that_straddle_the_pieces_of_a_large_file_are_read(path: Path) -> None:
    # Given rows of three bytes a character, so that some lie across every 64 KiB border
    row = ROW.replace("MRS ROBOT SOFT TOY", "€" * 200)

    orders = read(path, f"{HEADER}\n" + f"{row}\n" * 1000)

    assert {order["description"] for order in orders} == {"€" * 200}
    assert len(orders) == 1000


GOOD_LINES = f"{ROW}\n" * 2000
UNREADABLE = {
    "empty": (b"", None, "the file is empty"),
    "blank": ("\n\n  \n", None, "the file is empty"),
    "a byte order mark alone": (b"\xef\xbb\xbf", None, "the file is empty"),
    "a header alone": (HEADER, None, "a header and no rows"),
    "a missing column": (
        FILE.replace("UnitPrice", "Cost"),
        1,
        "no column UnitPrice; a file of orders has InvoiceNo, ",
    ),
    "semicolons": (FILE.replace(",", ";"), 1, "cells must be separated by commas"),
    "a column twice": (FILE.replace("Country", "quantity"), 1, "more than one column 'quantity'"),
    "a cell too few": (f"{HEADER}\n{ROW}\n539761,20705\n", 3, "2 cells, but the header has 8"),
    "a cell too many": (f"{HEADER}\n{ROW},\n", 2, "9 cells, but the header has 8"),
    "Latin-1": (
        f"{HEADER}\n{GOOD_LINES}{ROW.replace('ROBOT', 'CAFÉ')}\n".encode("latin-1"),
        2002,
        f"byte {len(HEADER) + 1 + len(GOOD_LINES) + ROW.index('ROBOT') + 3} (0xc9) is not utf-8 "
        "text. If the file is in another encoding, name it, for example --encoding latin-1",
    ),
    "a character cut in half at the end": (FILE.encode() + b"\xe2\x82", 3, "is not utf-8 text"),
    "UTF-16 without a byte order mark": (FILE.encode("utf-16-le"), 1, "--encoding utf-16-le"),
    "UTF-16 cut in half": (FILE.encode("utf-16")[:-1], 2, "is not utf-16 text"),
    "a NUL character": (FILE + ROW.replace("ROBOT", "\0"), 3, "a NUL character"),
    "a picture": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)), 1, "is not utf-8"),
    "a cell of 251 characters": (
        f"{HEADER}\n{ROW.replace('ROBOT', 'x' * 238)}\n",
        2,
        "cell 3 has 251 characters, 250 are allowed",
    ),
    "a cell of a megabyte": (f"{HEADER}\n{'x' * 1_000_000}", 2, "more than 262,144 characters"),
    "a quotation mark left open": (
        f'{HEADER}\n{ROW}\n"{ROW}\n{GOOD_LINES}',
        3,
        "is a quotation mark missing?",
    ),
    "a quotation mark left open near the end": (
        f'{HEADER}\n{ROW}\n"{ROW}\n',
        3,
        "is a quotation mark missing?",
    ),
    "text behind a quotation mark": (f'{HEADER}\n"a"b,{ROW}\n', 2, "is a quotation mark missing?"),
    "carriage returns as line ends": (FILE.replace("\n", "\r"), 1, "carriage returns as line ends"),
}


@pytest.mark.parametrize(("content", "line", "problem"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_another_file_is_refused_with_line_and_reason(
    path: Path, content: bytes | str, line: int | None, problem: str
) -> None:
    with pytest.raises(FileError) as refusal:
        read(path, content)

    assert problem in str(refusal.value)
    assert refusal.value.line == line


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        OrdersFile(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a regular file"):
        OrdersFile(tmp_path)


@pytest.mark.parametrize("encoding", ["no-such-encoding", "rot13", "base64"])
def test_an_unknown_encoding_is_refused(path: Path, encoding: str) -> None:
    with pytest.raises(FileError, match="unknown encoding"):
        read(path, FILE, encoding=encoding)
