"""A run as its files record it. Files may be missing or cut off, since a run may be unfinished or killed."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

Row = dict[str, Any]
FILES = ("config.json", "metrics.jsonl", "result.json")
TENSORS = "hyperparameters.json"


@dataclass(frozen=True)
class Recorded:
    """A run: what was asked for, its rows, and its result.

    Attributes:
        name: its title.
        config: its settings by name.
        rows: the rows of the history, or of an experiment's table, in order.
        result: the content of ``result.json``; None if the run has not ended.
        tensors: histograms and pictures of the hyperparameters, as `callbacks.Report` writes them.
        pictures: the figures in its folder, as PNG files.
        damaged: lines of ``metrics.jsonl`` that cannot be read.
    """

    name: str
    config: Row = field(default_factory=dict)
    rows: Sequence[Row] = ()
    result: Row | None = None
    tensors: Row = field(default_factory=dict)
    pictures: Sequence[Path] = ()
    damaged: int = 0

    @classmethod
    def read(cls, folder: Path) -> "Recorded":
        """The run in a folder.

        Raises:
            ArgumentError: there is no such folder, or it holds neither configuration nor rows nor result.
        """
        if not folder.is_dir():
            raise ArgumentError(f"a report needs the folder of a run; {folder} is no folder. Check the path.")
        if not any((folder / name).is_file() for name in FILES):
            raise ArgumentError(
                f"a report needs one of {', '.join(FILES)} in {folder}; there is none. Give the folder that a command "
                'named as "written to", or the folder of callbacks.JSONLines("FOLDER/metrics.jsonl").'
            )
        rows, damaged = _rows(folder / "metrics.jsonl")
        result = read_json(folder / "result.json")
        return cls(
            folder.resolve().name,
            _mapping(read_json(folder / "config.json")),
            rows,
            result if isinstance(result, dict) else None,
            _mapping(read_json(folder / TENSORS)),
            sorted(folder.glob("*.png")),
            damaged,
        )

    @cached_property
    def history(self) -> list[Row]:
        """The rows of hyper-steps, in order; empty if the rows belong to several runs.

        A run that was killed and continued may have made a hyper-step twice; the later row counts.
        """
        rows = [row for row in self.rows if is_number(row.get("hyper_step"))]
        if any(len({row[key] for row in rows if _plain(row.get(key))}) > 1 for key in ("seed", "method")):
            return []
        latest = {row["hyper_step"]: row for row in rows}
        return [latest[step] for step in sorted(latest)]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """The hyper-steps at which a number was measured, and the number, NaN where it was not finite."""
        rows = [row for row in self.history if key in row]
        values = [float(row[key]) if is_number(row[key]) else math.nan for row in rows]
        return [row["hyper_step"] for row in rows], values

    @cached_property
    def numbers(self) -> list[str]:
        """The keys of the history that hold numbers."""
        keys = dict.fromkeys(key for row in self.history for key in row)
        return [key for key in keys if any(is_number(row.get(key)) for row in self.history)]

    @cached_property
    def summaries(self) -> dict[str, list[tuple[float, Row]]]:
        """The summaries of each hyperparameter, with their hyper-steps."""
        found: dict[str, list[tuple[float, Row]]] = {}
        for row in self.history:
            for name, summary in _mapping(row.get("hyperparameters")).items():
                found.setdefault(name, []).append((row["hyper_step"], _mapping(summary)))
        return found


def _rows(path: Path) -> tuple[list[Row], int]:
    """The rows of a file, and how many lines of it cannot be read."""
    if not path.is_file():
        return [], 0
    rows, damaged = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                damaged += 1
    return rows, damaged


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def is_number(value: Any) -> bool:
    """Whether it is an integer or a finite float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float)
