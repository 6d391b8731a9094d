"""Text that fits the terminal: paragraphs, and tables that become blocks of lines where they are too wide."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

_LEAST = 24  # columns for a text that is folded inside a table


def width() -> int:
    """The columns of the terminal, or the number in the variable COLUMNS; a hundred where there is neither."""
    return max(20, shutil.get_terminal_size((100, 24)).columns)


def fold(text: str, following: str = "") -> str:
    """A paragraph as lines that fit, with ``following`` before each but the first."""
    return textwrap.fill(text, width(), subsequent_indent=following, break_on_hyphens=False)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text, their keys as columns.

    Where that is wider than the terminal, keys and the longest texts are folded. Where that is still too wide, each row
    is a block of lines "key: value".
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    texts = [any(isinstance(row.get(column), str) for row in rows) for column in columns]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if _excess(widths) > 0:  # fold the keys
        words = [max(column.split(), key=len) for column in columns]
        widths = [max(map(len, column)) for column in zip(words, *cells, strict=True)]
    if (excess := _excess(widths)) > 0 and any(texts):  # and the longest text
        longest = max(range(len(columns)), key=lambda i: widths[i] * texts[i])
        widths[longest] = min(widths[longest], max(_LEAST, widths[longest] - excess))
    if _excess(widths) > 0:
        pairs = [[(key, value) for key, value in zip(columns, row, strict=True) if value] for row in cells]
        return "\n\n".join("\n".join(fold(f"{key}: {value}", "    ") for key, value in row) for row in pairs)
    lines = [_line(row, widths, texts) for row in (columns, ["─" * w for w in widths], *cells)]
    return "\n".join(lines)


def _excess(widths: Sequence[int]) -> int:
    """How many columns too wide a table is."""
    return sum(widths) + 2 * (len(widths) - 1) - width()


def _line(cells: Sequence[str], widths: Sequence[int], texts: Sequence[bool]) -> str:
    """A row of the table, in several lines where cells are folded."""
    parts = [textwrap.wrap(c, w, break_on_hyphens=False) for c, w in zip(cells, widths, strict=True)]
    lines = []
    for line in zip_longest(*parts, fillvalue=""):
        triples = zip(line, widths, texts, strict=True)
        padded = (cell.ljust(w) if text else cell.rjust(w) for cell, w, text in triples)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def cell(value: Any, digits: int = 3) -> str:
    """A value as short text; a float with so many significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
