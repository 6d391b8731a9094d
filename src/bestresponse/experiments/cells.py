"""One row of a comparison, in a folder of its own, from which it goes on after a kill."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from ..runs import callbacks
from ..tuner import Callback, Tuner
from . import runs

# The result first: without it a kill in between leaves a row that is run anew.
_STATE = ("result.json", "run.pt", "metrics.jsonl", "search.db", "images.safetensors")
# Options that do not change a row.
_ASIDE = ("preset", "seeds", "rows", "threads", "out", "data_dir", "save_every")


@dataclass(frozen=True)
class Cell(ABC):
    """One row of one seed, in a folder of its own: what has ended is not run again, and what was stopped goes on.

    Args:
        config: the experiment's options.
        device: where to compute.
        name: of the row.
        seed: of the row.
        parent: the experiment's folder, which holds the row's own.
        watch: more callbacks of its tuners.
    """

    config: Any
    device: torch.device
    name: str
    seed: int
    parent: Path
    watch: Sequence[Callback] = field(default=(), kw_only=True)

    @property
    def folder(self) -> Path:
        """The row's own folder."""
        return self.parent / f"{self.name.replace(' ', '-')}-{self.seed}"

    def result(self) -> dict[str, Any]:
        """The row, run now or before."""
        path, settings = self.folder / "result.json", self.settings()
        ended = _read(path)
        if ended is None or ended.get("settings") != settings:
            if _read(self.folder / "settings.json") != settings:
                for name in _STATE:
                    (self.folder / name).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            runs.write_whole(self.folder / "settings.json", settings)
            torch.manual_seed(self.seed)
            ended = {"settings": settings, "row": self.run()}
            runs.write_whole(path, ended)
        return {"row": self.name, "seed": self.seed, "folder": self.folder.name, **ended["row"]}

    def settings(self) -> dict[str, Any]:
        """All that the row depends on; where it is another one, the row is run anew."""
        config = runs.as_json(self.config)
        kept = {name: value for name, value in config.items() if name not in _ASIDE}
        return {
            **kept,
            "row": self.name,
            "seed": self.seed,
            "version": runs.versions()["bestresponse"],
        }

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Run the row, from where its folder says that it was stopped."""

    def fit(
        self, tuner: Tuner, train: Iterable[Any], val: Iterable[Any], hyper_steps: int, save_every: int
    ) -> None:
        """Run a tuner up to so many hyper-steps, from where it was saved, and leave its rows and its state."""
        saved, metrics = self.folder / "run.pt", self.folder / "metrics.jsonl"
        tuner.callbacks += [
            callbacks.JSONLines(metrics),
            callbacks.Progress(),
            callbacks.Checkpoint(saved, save_every),
            *self.watch,
        ]
        if saved.is_file():
            tuner.load(saved)
        callbacks.replace_text(metrics, "".join(callbacks.to_json(row) + "\n" for row in tuner.history))
        tuner.fit(train, val, max(0, hyper_steps - tuner.hyper_step))


def check_rows(rows: Sequence[str]) -> None:
    """Raise where a table would have no row, or one twice."""
    if not rows or len(set(rows)) < len(rows):
        raise ArgumentError(
            f"--rows must name a row at least, and each once; got {', '.join(rows) or 'none'}."
        )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or not whole
        return None
