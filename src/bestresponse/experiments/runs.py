"""What every experiment leaves in its folder: configuration, rows as they come, result and figures."""

import dataclasses
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from ..errors import ArgumentError
from ..runs.callbacks import replace_text, to_json

# What does not change where a run goes.
_MAY_CHANGE = {"preset", "steps", "save_every", "resume", "threads", "device", "data_dir", "out"}


class Run:
    """A folder with ``config.json``, ``metrics.jsonl``, ``result.json`` and the figures drawn from them.

    Opening one begins it anew: rows, saved state and result of an earlier run in the same folder are removed.

    Args:
        folder: where to write; it is made.
        experiment: the experiment's name, which `bestresponse plot` reads.
        config: a dataclass, written to ``config.json``.
        figures: the names of what else the run leaves there, figures above all.
        resume: whether to keep what is there, and go on with it.

    Raises:
        ArgumentError: the folder cannot be made or written to; or ``resume``, and it holds no saved state, or
            that of another configuration.
    """

    def __init__(
        self,
        folder: Path,
        experiment: str,
        config: Any,
        figures: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        self.folder = folder
        self._began = time.perf_counter()
        if resume:
            self._check_resumed({"experiment": experiment, **as_json(config)})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in () if resume else ("metrics.jsonl", "result.json", self.state.name, *figures):
                (folder / name).unlink(missing_ok=True)
            write_whole(folder / "config.json", {"experiment": experiment, **as_json(config)})
        except OSError as error:
            raise ArgumentError(
                f"--out must name a folder that can be written to; got {folder}: {error.strerror}. Name another."
            ) from error

    def _check_resumed(self, config: dict[str, Any]) -> None:
        before = read_config(self.folder)
        if not self.state.is_file():
            raise ArgumentError(
                f"--resume needs a saved run; {self.folder} has no {self.state.name}. Begin it with --save-every."
            )
        names = config.keys() - _MAY_CHANGE
        differing = [f"{n}={before.get(n)!r}" for n in sorted(names) if before.get(n) != config[n]]
        if differing:
            raise ArgumentError(
                f"--resume goes on with the options that the run was begun with; it had {', '.join(differing)}."
            )

    @property
    def state(self) -> Path:
        """The file of the whole run's state."""
        return self.folder / "run.pt"

    @property
    def metrics(self) -> Path:
        """The file of rows."""
        return self.folder / "metrics.jsonl"

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Add rows to ``metrics.jsonl``, all of them at once."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(to_json(dict(row)) + "\n" for row in rows))

    def finish(
        self, headline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], seed: int, **more: Any
    ) -> None:
        """Write ``result.json``, and print the table and the folder's name."""
        result = {
            "headline": dict(headline),
            "rows": [dict(row) for row in rows],
            "seed": seed,
            "versions": versions(),
            "seconds": round(time.perf_counter() - self._began, 1),
            **more,
        }
        write_whole(self.folder / "result.json", result)
        print(table(rows))
        print(f"\nwritten to {self.folder}")


def mean_and_deviation(
    rows: Iterable[Mapping[str, Any]], by: Sequence[str], of: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows that agree in ``by`` as one: the mean of each of ``of``, and beside it, where several have it, the
    standard deviation as "NAME ±". Values of None or missing are left out.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    result = []
    for key, group in groups.items():
        merged: dict[str, Any] = dict(zip(by, key, strict=True))
        for name in of:
            values = [float(row[name]) for row in group if row.get(name) is not None]
            merged[name] = statistics.fmean(values) if values else None
            if len(group) > 1:
                merged[f"{name} ±"] = statistics.stdev(values) if len(values) > 1 else None
        result.append(merged)
    return result


def read_result(folder: Path) -> dict[str, Any] | None:
    """``result.json``, or None where the run has not ended."""
    path = folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``; a last line that was cut by a kill is left out."""
    return list(_lines(folder / "metrics.jsonl"))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, as written."""
    path = folder / "config.json"
    if not path.is_file():
        raise ArgumentError(f"{folder} must be the folder of a run; it has no config.json. Name another.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        config = None
    if not isinstance(config, dict):
        raise ArgumentError(
            f"{path} must hold the configuration of a run as JSON; it does not. Run it again."
        )
    return config


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ArgumentError(f"{path.parent} must hold rows; it has no {path.name}. Has the run begun?")
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return
        if isinstance(row, dict):
            yield row


def write_whole(path: Path, value: Any) -> None:
    """Write JSON so that the file is either the old one or the new one, and never a part."""
    replace_text(path, to_json(value, indent=2) + "\n")


def as_json(config: Any) -> dict[str, Any]:
    """A dataclass as plain values; paths become text."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()}


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "bestresponse": importlib.metadata.version("bestresponse"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text, their keys as columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Peak:
    """The largest memory in use since it was begun, in bytes; None where the system does not tell.

    On a GPU it counts tensors. On Linux it is the process's peak resident memory, whose mark is reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0

    def begin(self) -> Self:
        """Start to measure, from what is in use now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            except OSError:
                return self
            self._base = _status("VmRSS") or 0
        return self

    def read(self) -> int | None:
        """Bytes above the beginning."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._base
        peak = _status("VmHWM")
        return peak - self._base if peak is not None and self._base else None


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
