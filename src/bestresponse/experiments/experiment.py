"""What an experiment declares, and the loop that runs each of them."""

import math
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, dataclass_transform, get_args, get_type_hints

import torch
import tyro

from .. import _layout
from ..errors import ArgumentError
from ..runs.progress import Bar
from . import runs
from .runs import Row as Row

Preset = Literal["smoke", "cpu", "paper"]
Works = Sequence[Callable[[], Iterable[Row]]]


@dataclass(frozen=True)
class Range:
    """The finite numbers that an option takes, from ``low`` (above it, where ``above``) to ``high``."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)
        )

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        return "positive and finite" if self.above else f"≥ {self.low:g} and finite"


Count = Annotated[int, Range(0, above=True)]
Number = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
LogDecay = Annotated[float, Range(-14, 3)]  # the bounds of `WeightDecay`


def require(holds: bool, message: str) -> None:
    """Raise ArgumentError with the message where something does not hold."""
    if not holds:
        raise ArgumentError(message)


@dataclass_transform(kw_only_default=True)
class _Declared:
    """Makes each class that derives from it a dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True)(cls)


class Experiment(_Declared, ABC):
    """An experiment of the paper: its fields are the options of the command line, with those of smoke as defaults.

    A work is a function that makes rows. The loop writes each into metrics.jsonl as it comes, and the table is made of
    all of them; where `writes_history`, a work itself writes the hyper-steps of its tuner there, and its rows are those
    of the table.
    """

    name: ClassVar[str]  # on the command line
    cpu: ClassVar[str] = "--threads 0"  # the options that a preset stands for
    paper: ClassVar[str] = "--threads 0"
    labels: ClassVar[tuple[str, ...]] = ("data",)  # the options that the folder's usual name has
    figures: ClassVar[tuple[str, ...]]  # the files that `draw` makes
    files: ClassVar[tuple[str, ...]] = ()  # what else a run leaves, beside configuration, rows and result
    by: ClassVar[tuple[str, ...]] = ()  # rows that agree in these are one of the table,
    of: ClassVar[tuple[str, ...]] = ()  # with the means of these
    writes_history: ClassVar[bool] = False
    counted: ClassVar[bool] = False  # whether the loop shows how many works are done; else each shows its own

    preset: Preset = "smoke"
    """Where the other options begin: smoke takes under a minute and no data files, and shows that all runs, no more;
    cpu takes minutes on two cores with real data (augment and lstm an hour); paper is the paper's whole setting."""
    seed: int = 0  # The first seed. It draws the examples and the initial weights.
    device: str = "cpu"  # Where to compute: cpu, cuda, ...
    threads: Number = 1
    """Processor threads for torch; 0 leaves torch's choice. For networks as small as those of smoke, a second one
    costs more than it gives."""
    data_dir: Path | None = None
    """The folder of data files; also the environment variable BESTRESPONSE_DATA. docs/reproducing.md says which
    files of each data set."""
    out: Path | None = None
    """The folder to write to; by default a name under runs/. An earlier run's files there are replaced; augment and
    lstm go on with its rows where their options are the same."""

    @classmethod
    def of_preset(cls, preset: str) -> Self:
        """The options that a preset stands for."""
        words = {"smoke": "", "cpu": cls.cpu, "paper": cls.paper}.get(preset, "")
        prog = f"bestresponse reproduce {cls.name}"
        return tyro.cli(cls, prog=prog, args=["--preset", preset, *shlex.split(words)])

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The options of the run in a folder."""
        config, names = runs.read_config(folder), {field.name for field in fields(cls)}
        kept: Row = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in names}
        return cls(**kept)

    def all_seeds(self) -> Sequence[int]:
        """Each seed, in turn."""
        return [self.seed]

    def check(self) -> None:
        """Raise where an option is out of the range that its type names, or options do not go together."""
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            _check_range(field.name, hints[field.name], getattr(self, field.name))

    @abstractmethod
    def works(self, device: torch.device, folder: Path) -> Works:
        """Load the data, and return the pieces of work; raises where options do not go with the data."""

    def goes_on(self) -> bool:
        """Whether the run goes on with what is in its folder."""
        return False

    def table(self, rows: list[Row]) -> list[Row]:
        """The final table: means and deviations over seeds."""
        return runs.mean_and_deviation(rows, self.by, self.of)

    @abstractmethod
    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        """One or two numbers of the table, by name."""

    def more(self, rows: list[Row]) -> Row:
        """What else goes into result.json; "interrupted" ends the command as an interrupt does."""
        folders = [row["folder"] for row in rows if "folder" in row]
        return {"folders": folders} if folders else {}

    def note(self, rows: list[Row]) -> str:
        """What is printed under the table."""
        return ""

    @abstractmethod
    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Draw the figures into the folder, from the rows of metrics.jsonl and other files there."""


class Repeated(Experiment):
    """An experiment that takes several seeds."""

    seeds: Count = 1  # How many seeds to run; the table has the mean and the standard deviation over them.

    def all_seeds(self) -> Sequence[int]:
        return range(self.seed, self.seed + self.seeds)


def run(experiment: Experiment) -> Path:
    """Run an experiment, print its table and return its folder.

    Raises:
        ArgumentError: an option is out of its range, or options do not go together.
        Error: data files are missing.
    """
    device, began = _checked(experiment), time.perf_counter()
    labels = [str(getattr(experiment, label)) for label in experiment.labels]
    folder = experiment.out or Path("runs") / "-".join([experiment.name, *labels])
    works = experiment.works(device, folder)
    config = {"experiment": experiment.name, **runs.as_json(experiment)}
    runs.begin(folder, config, [*experiment.figures, *experiment.files], experiment.goes_on())
    rows = list(_rows(experiment, works, folder))
    if (folder / "metrics.jsonl").is_file():
        draw(folder, type(experiment))
    table = experiment.table(rows)
    result = {"headline": experiment.headline(table, rows), "rows": table, "seed": experiment.seed}
    result |= {"versions": runs.versions(), "seconds": round(time.perf_counter() - began, 1)}
    result |= experiment.more(rows)
    runs.write_whole(folder / "result.json", result)
    print("\n\n".join(filter(None, [_layout.table(table), experiment.note(rows), f"written to {folder}"])))
    if result.get("interrupted"):
        raise KeyboardInterrupt
    return folder


def _rows(experiment: Experiment, works: Works, folder: Path) -> Iterator[Row]:
    """The rows of all works, one after the other."""
    with closing(Bar(len(works), "work", shown=experiment.counted)) as bar:
        for work in works:
            for row in work():
                yield row if experiment.writes_history else runs.add(folder, row)
                bar.advance(0, ", ".join(f"{key} {row[key]}" for key in experiment.by if key in row))
            bar.advance()


def draw(folder: Path, kind: type[Experiment]) -> list[Path]:
    """Draw the figures of the run in a folder from its files alone, and return their paths; none without rows."""
    experiment, rows = kind.read(folder), runs.read_rows(folder)
    if rows:
        experiment.draw(folder, rows)
    return [folder / name for name in experiment.figures if rows and (folder / name).is_file()]


def _checked(experiment: Experiment) -> torch.device:
    """Check the options before anything is written, set the threads, and return the device."""
    experiment.check()
    try:
        device = torch.empty(0, device=experiment.device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        got = f"{experiment.device!r}: {str(error).splitlines()[0]}"
        raise ArgumentError(f"--device must name a device that is here; got {got}") from error
    if experiment.threads:
        torch.set_num_threads(experiment.threads)
    return device


def _check_range(name: str, hint: Any, value: Any) -> None:
    """A tuple must have one value at least, and each once."""
    values = value if isinstance(value, tuple) else (value,)
    option, shown = f"--{name.replace('_', '-')}", ", ".join(map(str, values)) or "none"
    once = bool(values) and len(set(values)) == len(values)
    require(once, f"{option} must name one at least, and each once; got {shown}.")
    for part in (hint, *get_args(hint)):
        for allowed in get_args(part):
            if isinstance(allowed, Range):
                require(all(x in allowed for x in values), f"{option} must be {allowed}; got {shown}.")
