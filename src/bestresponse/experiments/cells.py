"""One row of a comparison, in a folder of its own, from which it goes on after a kill."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import bestresponse as br

from ..runs.callbacks import replace_text, to_json
from . import runs
from .experiment import Experiment
from .runs import Row

# The result first: without it a kill in between leaves a row that is run anew.
_STATE = ("row.json", "run.pt", "metrics.jsonl", "search.db", "images.safetensors")
# Options that do not change a row.
_ASIDE = ("preset", "seeds", "rows", "threads", "out", "data_dir", "save_every")


@dataclass(frozen=True)
class Cell:
    """One row of one seed: what has ended is not run again, and what was stopped goes on."""

    experiment: Experiment
    name: str
    seed: int
    parent: Path  # the experiment's folder, which holds the row's own
    make: Callable[["Cell"], Row]  # runs the row, from where its folder says that it was stopped
    aside: Sequence[str] = ()  # options that do not change this row
    watch: Sequence[Callable[[br.Tuner], None]] = ()  # more callbacks of its tuners

    @property
    def folder(self) -> Path:
        """The row's own folder."""
        return self.parent / f"{self.name.replace(' ', '-')}-{self.seed}"

    def __call__(self) -> Iterator[Row]:
        """The row, run now or before."""
        path, settings = self.folder / "row.json", self._settings()
        ended = runs.read_json(path)
        if not isinstance(ended, dict) or ended.get("settings") != settings:
            if runs.read_json(self.folder / "settings.json") != settings:
                for name in _STATE:
                    (self.folder / name).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            runs.write_whole(self.folder / "settings.json", settings)
            torch.manual_seed(self.seed)
            ended = {"settings": settings, "row": self.make(self)}
            runs.write_whole(path, ended)
        yield {"row": self.name, "seed": self.seed, "folder": self.folder.name, **ended["row"]}

    def _settings(self) -> Row:
        """All that the row depends on; where it is another one, the row is run anew."""
        config = runs.as_json(self.experiment)
        kept = {name: value for name, value in config.items() if name not in (*_ASIDE, *self.aside)}
        version = runs.versions()["bestresponse"]
        return {**kept, "row": self.name, "seed": self.seed, "version": version}

    def fit(
        self, tuner: br.Tuner, train: Iterable[Any], val: Iterable[Any], hyper_steps: int, save_every: int
    ) -> None:
        """Run a tuner up to so many hyper-steps, from where it was saved, and leave its rows and its state."""
        saved, metrics = self.folder / "run.pt", self.folder / "metrics.jsonl"
        tuner.callbacks += [br.callbacks.JSONLines(metrics), br.callbacks.Progress()]
        tuner.callbacks += [br.callbacks.Checkpoint(saved, save_every), *self.watch]
        if saved.is_file():
            tuner.load(saved)
        replace_text(metrics, "".join(to_json(row) + "\n" for row in tuner.history))
        tuner.fit(train, val, max(0, hyper_steps - tuner.hyper_step))
