"""The small commands of the command line: their options, and what they do."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from . import _layout
from .diagnostics import check
from .errors import ArgumentError, Error, require_integer
from .reports import Recorded, write_comparison, write_report
from .runs.streams import Stream
from .runs.weight_steps import WeightSteps
from .tuning.setup import Setup, first_batch, made


@dataclass
class Plot:
    """Draw the figures of a run again from the files in its folder."""

    folder: Path
    """The folder of the run."""

    def run(self) -> None:
        """Draw, and print the files."""
        from .experiments import catalogue

        print("\n".join(str(path) for path in catalogue.draw(self.folder)))


@dataclass
class WriteReport:
    """Write the report of a run into one HTML file, which any browser shows without a network.

    The run may be unfinished.
    """

    folder: Path
    """The folder of the run, with config.json, metrics.jsonl and result.json as far as they are there."""
    out: Path | None = None
    """The file to write; the default is report.html in the folder."""

    def run(self) -> None:
        """Write the report, and print its path."""
        run = Recorded.read(self.folder)
        path = self.out or self.folder / "report.html"
        write_report(run, path)
        print(path)


@dataclass
class Compare:
    """Lay runs side by side in one HTML file.

    It has their results, the settings in which they differ, and their lines in common charts.
    """

    folders: tuple[Path, ...]
    """The folders of two to eight runs."""
    out: Path = Path("compare.html")
    """The file to write."""

    def run(self) -> None:
        """Write the comparison, and print its path."""
        write_comparison([Recorded.read(folder) for folder in self.folders], self.out)
        print(self.out)


@dataclass
class Init:
    """Write a small file with a problem to tune. It runs as it is; replace its parts with your own."""

    file: Path
    """The file to write, by default problem.py; one that exists is left alone."""

    def run(self) -> None:
        """Write the file, and print what to do with it."""
        if self.file.suffix != ".py":
            raise ArgumentError(
                f"init needs a file of Python; got {self.file}. Give it a name that ends in .py."
            )
        template = Path(__file__).parent / "tuning" / "template.txt"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("x", encoding="utf-8") as file:
                file.write(template.read_text(encoding="utf-8").replace("{file}", self.file.as_posix()))
        except FileExistsError as error:
            raise ArgumentError(
                f"init writes a new file; {self.file} exists. Choose another name."
            ) from error
        except OSError as error:
            raise ArgumentError(f"init needs a place to write {self.file}: {error.strerror}.") from error
        place = f"{self.file}:make_problem"
        print(f"written to {self.file}\nNow run: bestresponse tune {place} --steps 200 --out runs/first")
        print(f"and before you tune a problem of your own: bestresponse check {place} --warmup-steps 100")


@dataclass
class CheckProblem:
    """Check whether a problem is ready for tuning, and compare the results and costs of all methods on it."""

    place: str
    """A function, as package.module:function or path/to/file.py:function, that returns (problem, train_batch,
    val_batch), these and the weight optimiser, or a bestresponse.tuning.Setup. The module may be in the current
    folder."""
    json: Path | None = None
    """A JSON file for all results."""
    warmup_steps: int = 0
    """Weight steps before the check, by the optimiser of the problem: a check needs trained weights."""
    retrain_steps: int = 100
    """Steps in each of the five retraining runs that hypergradients are compared with; 0 skips the comparison."""
    seed: int = 0
    """The seed of the random state of each pass."""

    def run(self) -> int:
        """Check, print, and return the exit status: 1 if the problem has an error, 2 if there is no problem."""
        try:
            if self.json is not None:
                self.json.touch()  # fail before the long check, not after it
            require_integer("--warmup-steps", self.warmup_steps, 0)
            setup = made(self.place)
            _warm_up(setup, self.warmup_steps)
            found = check(
                setup.problem,
                first_batch("train_batches", setup.train_batches),
                first_batch("val_batches", setup.val_batches),
                weight_optimizer=setup.weight_optimizer,
                retrain_steps=self.retrain_steps,
                seed=self.seed,
                progress=_say,
            )
        except (Error, OSError) as error:
            print(f"bestresponse: {error}", file=sys.stderr)
            return 2
        print(found)
        if self.json is not None:
            text = json.dumps(found.data(), indent=2, allow_nan=False)
            self.json.write_text(text + "\n", encoding="utf-8")
        return 0 if found.ok else 1


def _warm_up(setup: Setup, steps: int) -> None:
    """Train the weights."""
    optimizer, batches = setup.optimizers()[0], Stream("train_batches", setup.train_batches)
    weights = WeightSteps(setup.problem, optimizer)
    for _ in range(steps):
        weights.step(optimizer, next(batches), None)


def _say(part: str) -> None:
    print(_layout.fold(f"checking: {part}", " " * 4), file=sys.stderr, flush=True)
