"""One run of ``bestresponse tune``: its callbacks and the files in its folder."""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .. import _layout
from .._files import replacing
from ..errors import ArgumentError, require, require_integer
from ..experiments import runs
from ..runs import callbacks
from ..runs.report import settings, versions
from ..runs.summary import plain_values
from ..tuner import Tuner
from .method_names import method_of
from .setup import Setup, made

_STATE, _TUNED = "run.pt", "tuned.pt"
_FEW = 20  # hyperparameters whose values are printed


@dataclass
class Tune:
    """Tune your own problem, with progress, checkpoints and a report.

    A function of yours makes the problem; `bestresponse init` writes a file with one to start from.
    """

    place: str
    """The function, as package.module:function or path/to/file.py:function. It returns a bestresponse.tuning.Setup, or
    (problem, train_batch, val_batch)."""
    method: str | None = None
    """How the hypergradient is computed, as in Python: 'Implicit(Neumann(20))', 'Unrolled(10, 0.1)', or a name such as
    minres. The default is the method of the Setup, or Implicit()."""
    steps: int = 1000
    """Hyper-steps of the whole run; a resumed run makes those that are missing."""
    out: Path | None = None
    """The folder to write to; the default is runs/tune-FUNCTION. A finished run there is replaced; an unfinished one is
    not."""
    resume: bool = False
    """Continue the run in the folder from its last checkpoint."""
    weight_steps: int = 1
    """Weight steps before each hyper-step."""
    warmup_steps: int = 0
    """Weight steps before the first hyper-step."""
    clip_weights: float | None = None
    """The largest norm of the training gradient."""
    policy: Literal["warn", "raise", "skip", "return"] = "warn"
    """What to do when a solve fails or a number is not finite: warn or end the run, end it, skip the step, or return to
    the last good state with half the hyper-step."""
    watch_every: int = 10
    """Hyper-steps between two measurements of the watch, if the Setup has one."""
    patience: int = 0
    """End the run after so many measurements of the watch without a new minimum; 0 never ends it."""
    save_every: int = 0
    """Hyper-steps between two checkpoints; 0 means a tenth of --steps, at most 100. The end is saved in any case."""
    seed: int = 0
    """The seed of torch before the function is called, and of the random draws in hypergradients."""
    threads: int = 0
    """CPU threads for torch; 0 keeps torch's default."""

    def run(self) -> None:
        """Tune, print the result, and write the folder.

        Raises:
            Error: an option is out of its range, the function makes no problem, or the run fails.
        """
        self._check()
        if self.threads:
            torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)
        setup = made(self.place)
        folder = self.out or Path("runs") / f"tune-{self.place.rpartition(':')[2]}"
        report = callbacks.Report(folder / "report.html", config={"command": "tune", **runs.as_json(self)})
        tuner = self._tuner(setup, folder, report)
        self._begin(tuner, report, folder)
        self._fit(tuner, setup, folder)
        _finish(tuner, folder, self.seed)

    def _check(self) -> None:
        for name, least in (
            ("steps", 1),
            ("save_every", 0),
            ("watch_every", 1),
            ("patience", 0),
            ("threads", 0),
        ):
            require_integer(f"--{name.replace('_', '-')}", getattr(self, name), least)

    def _tuner(self, setup: Setup, folder: Path, report: callbacks.Report) -> Tuner:
        watch = None if setup.watch is None else callbacks.Watch(setup.watch, self.watch_every)
        require(
            watch is not None or not self.patience,
            "--patience",
            "0 without a watch in the Setup",
            self.patience,
        )
        stop = [callbacks.EarlyStopping("watch_loss", self.patience)] if self.patience else []
        own: list[Any] = [callbacks.Progress(), callbacks.JSONLines(folder / "metrics.jsonl"), report]
        weight_optimizer, hyper_optimizer = setup.optimizers()
        return Tuner(
            setup.problem,
            weight_optimizer,
            hyper_optimizer,
            setup.method if self.method is None else method_of(self.method),
            weight_steps=self.weight_steps,
            warmup_steps=self.warmup_steps,
            weight_scheduler=setup.weight_scheduler,
            hyper_scheduler=setup.hyper_scheduler,
            clip_weights=self.clip_weights,
            policy=self.policy,
            seed=self.seed,
            watch=watch,
            callbacks=[*setup.callbacks, *stop, *own, callbacks.Checkpoint(folder / _STATE, self._every)],
        )

    @property
    def _every(self) -> int:
        return self.save_every or max(1, min(100, self.steps // 10))

    def _begin(self, tuner: Tuner, report: callbacks.Report, folder: Path) -> None:
        """Make the folder, or load the run that is in it."""
        config = report.config | settings(tuner) | {"versions": versions()}
        if not self.resume and (folder / _STATE).is_file() and not (folder / "result.json").is_file():
            raise ArgumentError(
                f"--out must not name the folder of an unfinished run; {folder} holds the checkpoint {_STATE} of one. "
                "Add --resume to continue it, choose another folder, or remove this one."
            )
        resumed = list(runs.read_config(folder).get("resumed_after", [])) if self.resume else []
        runs.begin(folder, config, [_TUNED, "report.html", "hyperparameters.json"], self.resume)
        if self.resume:
            tuner.load(folder / _STATE)
            resumed.append(tuner.hyper_step)
        report.config["resumed_after"] = resumed
        runs.write_whole(folder / "config.json", config | {"resumed_after": resumed})

    def _fit(self, tuner: Tuner, setup: Setup, folder: Path) -> None:
        missing = max(0, self.steps - tuner.hyper_step)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                tuner.fit(setup.train_batches, setup.val_batches, missing)
        except KeyboardInterrupt:
            if (folder / _STATE).is_file():
                print(f"\nThe same command with --resume continues the run in {folder}.", file=sys.stderr)
            raise


def _finish(tuner: Tuner, folder: Path, seed: int) -> None:
    """Write the tuned state and the result, and print the result."""
    last = tuner.history[-1]
    titles = {"train_loss": "training loss", "val_loss": "validation loss"}
    titles |= {} if tuner.watch is None else {"watch_loss": "watch loss"}
    rows = [_row("first", tuner.history[0], titles), _row("last", last, titles)]
    headline = {"validation loss, last": last["val_loss"]}
    kept = last
    if tuner.watch is not None and tuner.watch.row is not None:
        kept = tuner.watch.row
        tuner.watch.restore(tuner)
        rows.append(_row("best on the watch", kept, titles))
        headline = {"watch loss, lowest": kept["watch_loss"]} | headline
    state = {name: getattr(tuner.problem, name).state_dict() for name in ("model", "hyper")}
    with replacing(folder / _TUNED, "tune") as file:
        torch.save(state | {"hyper_step": kept["hyper_step"]}, file)
    values = _values(tuner)
    result = {
        "headline": headline,
        "rows": rows,
        "seed": seed,
        "versions": versions(),
        "hyperparameters": values,
    }
    result |= {"seconds": round(last["seconds"], 1), "stopped": tuner.stopped}
    runs.write_whole(folder / "result.json", result)
    stopped = f"The run stopped early: {tuner.stopped}." if tuner.stopped else ""
    state_of = f"{folder / _TUNED} holds the state after hyper-step {kept['hyper_step']}: model and hyper."
    shown = [f"{name} = {', '.join(f'{x:.4g}' for x in numbers)}" for name, numbers in values.items()]
    texts = [
        "\n".join(_layout.fold(text, "    ") for text in shown),
        _layout.fold(stopped),
        _layout.fold(state_of),
    ]
    parts = [_layout.table(rows), *filter(None, texts)]
    print("\n\n".join([*parts, f"written to {folder}"]))


def _values(tuner: Tuner) -> dict[str, list[float]]:
    """The values of the kept hyperparameters, if they are few."""
    found = plain_values(tuner.problem)
    few = sum(x.numel() for x in found.values()) <= _FEW
    return {name: x.flatten().tolist() for name, x in found.items()} if few else {}


def _row(state: str, row: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, Any]:
    return {
        "state": state,
        "hyper-step": row["hyper_step"],
        **{title: row.get(key) for key, title in titles.items()},
        "hypergradient": row["hypergradient_norm"],
    }


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(_layout.fold(f"bestresponse: {message}"), file=sys.stderr, flush=True)
