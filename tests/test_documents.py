"""The tables and the figures of the documents come from the same runs.

docs/results/NAME.json is the result.json of ``bestresponse reproduce NAME``. Its figures carry the digest of the same rows, and
the numbers of the first table below its command are those of its rows.
"""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = sorted((DOCS / "results").glob("*.json"))
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def _table(page, name):
    """Header and rows of the first table below the command of an experiment, as lists of cells."""
    text = page.read_text("utf-8")
    found = re.search(rf"^    bestresponse reproduce {re.escape(name)}\b.*?^(\|.*?)\n(?!\|)", text, re.M | re.S)
    if not found:
        return None
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    return header, lines


def _values(row):
    return [float(x) for x in row.values() if isinstance(x, int | float) and not isinstance(x, bool)]


def _is_rounded(text, values):
    """Whether a printed number is one of the values, or its hundredfold, to the digits that it has."""
    plain = text.replace(",", "").replace("−", "-")
    mantissa, _, exponent = plain.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    half = 0.51 * 10.0**-decimals
    return any(abs(float(plain) - scale * value) <= half for value in values for scale in (1.0, 100.0))


def test_a_wrong_digit_would_be_found():
    assert _is_rounded("87.1", [0.8706])
    assert _is_rounded("−0.03", [-0.0312])
    assert _is_rounded("2.3e-02", [0.0231])
    assert not _is_rounded("87.2", [0.8706])
    assert not _is_rounded("0.04", [-0.0312])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_table_has_the_numbers_of_its_result(path):
    rows = json.loads(path.read_text("utf-8"))["rows"]
    tables = [table for page in sorted(DOCS.glob("*.md")) if (table := _table(page, path.stem))]
    assert tables, f"no page has the command and a table of {path.stem}"
    header, lines = tables[0]
    shown = 0
    for label, *cells in lines:
        mine = [row for row in rows if label.strip("*` ") in map(str, row.values())]
        assert mine, f"no row of the result is named {label}"
        values = [value for row in mine for value in _values(row)]
        for column, cell in zip(header[1:], cells, strict=True):
            for number in NUMBER.findall("" if "paper" in column else cell):
                assert _is_rounded(number, values), f"{label}, {column}: {number} is not in the result"
                shown += 1
    assert shown


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_figure_was_drawn_from_the_rows_of_its_result(path):
    image = pytest.importorskip("PIL.Image")
    figures = [f for f in (DOCS / "figures").glob("*.png") if f.stem == path.stem]
    assert figures
    digest = json.loads(path.read_text("utf-8"))["metrics_sha256"]
    assert [f.name for f in figures if image.open(f).text.get("Source") != digest] == []
