"""The files of a run: configuration, rows and result."""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._files import file_errors, replace_text
from ..errors import ArgumentError
from ..reports.recorded import read_json as read_json
from ..runs.callbacks import to_json
from ..runs.report import versions as versions

Row = dict[str, Any]

# Options that may differ when a run is resumed.
_MAY_CHANGE = {"preset", "steps", "save_every", "resume", "threads", "device", "data_dir", "out"}
_MAY_CHANGE |= {"watch_every", "patience", "versions"}


def begin(folder: Path, config: Row, files: Sequence[str] = (), resume: bool = False) -> None:
    """Create a run's folder, and write its configuration.

    Rows, saved state and result of an earlier run in the same folder are removed, and also its other ``files``. With
    ``resume``, everything stays.

    Raises:
        ArgumentError: the folder cannot be created or written to; or, with ``resume``, it has no saved state, or one
            of another configuration.
    """
    if resume:
        _check_resumed(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in () if resume else ("metrics.jsonl", "result.json", "run.pt", *files):
            (folder / name).unlink(missing_ok=True)
        write_whole(folder / "config.json", config)
    except OSError as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or error
        raise ArgumentError(
            f"--out must name a folder that can be written to; got {folder}: {reason}. Choose another."
        ) from error


def _check_resumed(folder: Path, config: Row) -> None:
    before = read_config(folder)
    if not (folder / "run.pt").is_file():
        raise ArgumentError(f"--resume needs a saved run; {folder} has no run.pt. Start with --save-every.")
    names = sorted(config.keys() - _MAY_CHANGE)
    differing = ", ".join(f"{n}={before.get(n)!r}" for n in names if before.get(n) != config[n])
    if differing:
        raise ArgumentError(f"--resume needs the options of the saved run; it had {differing}. Repeat them.")


def add(folder: Path, row: Row) -> Row:
    """Append a row to ``metrics.jsonl``, and return it as a reader will get it."""
    line = to_json(row)
    path = folder / "metrics.jsonl"
    with file_errors(path, "--out"), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    written: Row = json.loads(line)
    return written


def mean_and_deviation(rows: Iterable[Mapping[str, Any]], by: Sequence[str], of: Sequence[str]) -> list[Row]:
    """Merge rows that agree in ``by``, and take the mean of each column of ``of``.

    If several rows are merged, the column "NAME ±" has the standard deviation. None and missing values are left out.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    result = []
    for key, group in groups.items():
        merged: Row = dict(zip(by, key, strict=True))
        for name in of:
            values = [float(row[name]) for row in group if row.get(name) is not None]
            merged[name] = statistics.fmean(values) if values else None
            if len(group) > 1:
                merged[f"{name} ±"] = statistics.stdev(values) if len(values) > 1 else None
        result.append(merged)
    return result


def read_config(folder: Path) -> Row:
    """``config.json``, as written."""
    path = folder / "config.json"
    if not path.is_file():
        raise ArgumentError(f"{folder} must be the folder of a run; it has no config.json. Choose another.")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ArgumentError(f"{path} must hold the configuration of a run; it does not. Run it again.")
    return config


def read_rows(folder: Path) -> list[Row]:
    """The rows of ``metrics.jsonl``, without a last line that a kill cut off."""
    path, rows = folder / "metrics.jsonl", []
    if not path.is_file():
        raise ArgumentError(f"{folder} must hold rows; it has no {path.name}. Has the run started?")
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [row for row in rows if isinstance(row, dict)]


def digest(folder: Path) -> str:
    """The SHA-256 of ``metrics.jsonl``, in hexadecimal; of nothing if there is no such file."""
    path = folder / "metrics.jsonl"
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def write_whole(path: Path, value: Any) -> None:
    """Write JSON so that the file is always the whole old one or the whole new one."""
    replace_text(path, to_json(value, indent=2) + "\n", "--out")


def as_json(config: Any) -> Row:
    """A dataclass as plain values, with paths as text."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()}
