"""One row of a comparison, with its own folder, from which it continues after a kill."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bestresponse as br

from .._files import replace_text
from ..runs.callbacks import to_json
from . import runs
from .experiment import Experiment
from .runs import Row

# The result comes first: if a kill interrupts the removal, the row is still run again.
_STATE = ("row.json", "run.pt", "metrics.jsonl", "search.db", "best.json", "images.safetensors")
# Options without effect on a row.
_NO_EFFECT = ("preset", "seeds", "rows", "threads", "out", "data_dir", "save_every")


@dataclass(frozen=True)
class Cell:
    """One row for one seed: a finished row is read, a stopped one continues.

    Attributes:
        parent: the experiment's folder; the row's own folder is inside.
        make: runs the row, from the state in its folder.
        no_effect: options without effect on this row.
        watch: further callbacks of its tuner.
    """

    experiment: Experiment
    name: str
    seed: int
    parent: Path
    make: Callable[["Cell"], Row]
    no_effect: Sequence[str] = ()
    watch: Sequence[Callable[[br.Tuner], None]] = ()

    @property
    def folder(self) -> Path:
        """The row's own folder."""
        plain = re.sub(r"[^\w.+-]+", "-", self.name)  # a name of a file on every system
        return self.parent / f"{plain}-{self.seed}"

    def __call__(self) -> Iterator[Row]:
        """The row, from its folder or from a run."""
        path, settings = self.folder / "row.json", self._settings()
        finished = runs.read_json(path)
        if not isinstance(finished, dict) or finished.get("settings") != settings:
            if runs.read_json(self.folder / "settings.json") != settings:
                for name in _STATE:
                    (self.folder / name).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            runs.write_whole(self.folder / "settings.json", settings)
            torch.manual_seed(self.seed)
            finished = {"settings": settings, "row": self.make(self)}
            runs.write_whole(path, finished)
        yield {"row": self.name, "seed": self.seed, "folder": self.folder.name, **finished["row"]}

    def _settings(self) -> Row:
        """Everything that the row depends on. If it changes, the row is run again."""
        config = runs.as_json(self.experiment)
        left_out = (*_NO_EFFECT, *self.no_effect)
        # A file has lists where an option is a tuple.
        kept = {k: list(v) if isinstance(v, tuple) else v for k, v in config.items() if k not in left_out}
        version = runs.versions()["bestresponse"]
        return {**kept, "row": self.name, "seed": self.seed, "version": version}

    def fit(
        self, tuner: br.Tuner, train: Iterable[Any], val: Iterable[Any], hyper_steps: int, save_every: int
    ) -> None:
        """Run a tuner up to ``hyper_steps``, from its saved state if there is one; write its rows and its state."""
        saved, metrics = self.folder / "run.pt", self.folder / "metrics.jsonl"
        tuner.callbacks += [br.callbacks.JSONLines(metrics), br.callbacks.Progress()]
        tuner.callbacks += [br.callbacks.Checkpoint(saved, save_every), *self.watch]
        if saved.is_file():
            tuner.load(saved)
        replace_text(metrics, "".join(to_json(row) + "\n" for row in tuner.history), "--out")
        tuner.fit(train, val, max(0, hyper_steps - tuner.hyper_step))
