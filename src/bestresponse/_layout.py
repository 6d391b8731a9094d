"""Text that fits the terminal: paragraphs, and tables that become blocks where they are too wide."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


def width() -> int:
    """The columns of the terminal, or the number in the variable COLUMNS; a hundred where there is neither."""
    return max(20, shutil.get_terminal_size((100, 24)).columns)


def fold(text: str, first: str = "", following: str = "") -> str:
    """A paragraph in lines that fit; ``first`` stands before its first line, ``following`` before each other one."""
    if len(following) > width() // 3:  # no room beside it
        following = "  "
    return textwrap.fill(
        text, width(), initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text with their keys as columns; a block of lines "key: value" each where that is too wide."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > width():
        return _blocks(columns, cells)
    lefts = [any(isinstance(row.get(column), str) for row in rows) for column in columns]
    rule = ["─" * width for width in widths]
    return "\n".join(_line(line, widths, lefts) for line in (columns, rule, *cells))


def _line(cells: Sequence[str], widths: Sequence[int], lefts: Sequence[bool]) -> str:
    padded = [
        cell.ljust(width) if left else cell.rjust(width)
        for cell, width, left in zip(cells, widths, lefts, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Each row as lines, one for each of its cells."""
    blocks = []
    for row in rows:
        lines = [
            fold(f"{key}: {value}", following="    ")
            for key, value in zip(columns, row, strict=True)
            if value
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
