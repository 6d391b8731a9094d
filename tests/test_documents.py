"""The tables and the figures of the documents come from the same runs.

docs/results/NAME.json is the result.json of ``bestresponse reproduce NAME``, and NAME.more.json that of the same
experiment with other options. A figure with that name carries the digest of the same metrics.jsonl. Below that command,
a table whose lines have the names of its rows shows their numbers; a table may also show several runs, each in lines or
in a column of its own.
"""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = sorted((DOCS / "results").glob("*.json"))
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def _tables(page, name):
    """The tables of the section that has the command of an experiment: header and rows, as lists of cells."""
    for section in re.split(r"^##+ ", page.read_text("utf-8"), flags=re.M):
        if re.search(rf"^    bestresponse reproduce {re.escape(name)}\b", section, re.M):
            for table in re.findall(r"^\|.*\n(?:\|.*\n)+", section, re.M):
                cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
                yield cells[0], cells[2:]


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


def _differences(header, cells, row):
    """The numbers of a line, and those of them that are not in a row of a result; None if the names differ."""
    own = [
        (column, cell.strip("*`"))
        for column, cell in zip(header, cells, strict=True)
        if "paper" not in column
    ]
    values, texts = _values(row), {x for x in row.values() if isinstance(x, str)}
    if own[0][1] not in texts:
        return None
    numbers = [(column, n) for column, cell in own if cell not in texts for n in NUMBER.findall(cell)]
    return numbers, [f"{column}: {n}" for column, n in numbers if not _is_rounded(n, values)]


def _compared(table, rows):
    """For each line of a table its numbers and the fewest differences; None if the table shows other things."""
    own = [cells for cells in table[1] if not cells[0].startswith("the paper")]
    lines = [[_differences(table[0], cells, row) for row in rows] for cells in own]
    found = [[d for d in line if d is not None] for line in lines]
    return [min(line, key=lambda d: len(d[1])) for line in found] if found and all(found) else None


def _parts(table):
    """The first column of a table with each other one; and each of its lines alone."""
    header, lines = table
    for number in range(1, len(header)):
        yield [header[0], header[number]], [[cells[0], cells[number]] for cells in lines]
    for cells in lines:
        yield header, [cells]


def _names(path):
    return [next(iter(row.values())) for row in json.loads(path.read_text("utf-8"))["rows"]]


def _shares_a_table(path):
    """Whether another run has the same rows: then each has a column of one table."""
    name = path.stem.partition(".")[0]
    others = [other for other in RESULTS if other != path and other.stem.partition(".")[0] == name]
    return any(_names(other)[:4] == _names(path)[:4] for other in others)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_table_has_the_numbers_of_its_result(path):
    rows = json.loads(path.read_text("utf-8"))["rows"]
    name = path.stem.partition(".")[0]
    tables = [table for page in sorted(DOCS.glob("*.md")) for table in _tables(page, name)]
    compared = [found for table in tables if (found := _compared(table, rows))]
    if not compared or _shares_a_table(path):
        # One of several runs, each with a column or a line of a table.
        parts = [part for table in tables for part in _parts(table)]
        compared = [found for part in parts if (found := _compared(part, rows))]
    assert compared, "no table has the names of the rows of the result"
    nearest = min(compared, key=lambda found: sum(len(wrong) for _, wrong in found))
    assert any(numbers for numbers, _ in nearest)
    assert [wrong for _, wrong in nearest if wrong] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_each_row_of_a_result_that_a_table_names_is_shown_with_its_numbers(path):
    name = path.stem.partition(".")[0]
    tables = [table for page in sorted(DOCS.glob("*.md")) for table in _tables(page, name)]
    if _shares_a_table(path):
        tables = [part for table in tables for part in _parts(table)]
    lines = [(header, cells) for header, found in tables for cells in found]
    result = json.loads(path.read_text("utf-8"))
    for row in [*result["rows"], *result.get("orders", [])]:
        shown = [d for header, cells in lines if (d := _differences(header, cells, row)) is not None]
        assert not shown or any(numbers and not wrong for numbers, wrong in shown), row


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_figure_was_drawn_from_the_rows_of_its_result(path):
    image = pytest.importorskip("PIL.Image")
    figures = [f for f in (DOCS / "figures").glob("*.png") if f.stem == path.stem]
    assert figures or "." in path.stem  # further runs in one table may have no figure of their own
    digest = json.loads(path.read_text("utf-8"))["metrics_sha256"]
    assert [f.name for f in figures if image.open(f).text.get("Source") != digest] == []
