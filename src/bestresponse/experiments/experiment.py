"""The base class of all experiments, and the loop that runs one."""

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
from ..runs.events import events
from ..runs.progress import Bar
from . import runs
from .runs import Row as Row

_SHOWN = 20  # events in the printed table

Preset = Literal["smoke", "quick", "cpu", "paper"]
Tasks = Sequence[Callable[[], Iterable[Row]]]


@dataclass(frozen=True)
class Range:
    """The finite numbers that an option accepts: ``low`` to ``high``, without ``low`` itself if ``above``."""

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
Seed = Annotated[int, Range(-(2**62), 2**62)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
LogDecay = Annotated[float, Range(-14, 3)]  # the bounds of `WeightDecay`


def require(condition: bool, message: str) -> None:
    """Raise ArgumentError with the message unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


@dataclass_transform(kw_only_default=True)
@dataclass(kw_only=True)
class Experiment(ABC):
    """An experiment of the paper. Its fields are the options of the command line; their defaults are those of smoke.

    Each subclass becomes a dataclass. A task is a function that yields rows. The loop writes each row into
    metrics.jsonl at once, and makes the table from all rows. With `writes_history`, a task writes the hyper-steps of
    its tuner there instead, and its rows go into the table only.
    """

    name: ClassVar[str]  # on the command line
    quick: ClassVar[str] = ""  # the options of this preset; none means those of cpu
    cpu: ClassVar[str] = "--threads 0"
    paper: ClassVar[str] = "--threads 0"
    labels: ClassVar[tuple[str, ...]] = ("data",)  # the options in the default name of the folder
    figures: ClassVar[tuple[str, ...]]  # the files that `draw` writes
    files: ClassVar[tuple[str, ...]] = ()  # other files of a run, besides configuration, rows and result
    by: ClassVar[tuple[str, ...]] = ()  # the table merges rows that agree in these columns
    of: ClassVar[tuple[str, ...]] = ()  # and shows the means of these
    writes_history: ClassVar[bool] = False
    counted: ClassVar[bool] = False  # whether the loop shows the progress; otherwise each task shows its own

    preset: Preset = "smoke"
    """The defaults of the other options. smoke takes under a minute, needs no data files, and only shows that
    everything runs. cpu takes minutes on two cores with real data (augment and lstm an hour, generalisation three).
    quick is shorter for some, and the same as cpu elsewhere. paper is the paper's full setting."""
    seed: Seed = 0  # The first seed; it determines the examples and the initial weights.
    device: str = "cpu"  # Where to compute: cpu, cuda, ...
    threads: Annotated[int, Range(0, 4096)] = 1
    """CPU threads for torch; 0 keeps torch's default. With networks as small as those of smoke, a second thread makes
    a run slower."""
    data_dir: Path | None = None
    """The folder of the data files; the default is the environment variable BESTRESPONSE_DATA. docs/reproducing.md
    lists the files of each data set."""
    out: Path | None = None
    """The folder to write to; the default is a name under runs/. Files of an earlier run there are replaced;
    adapters, augment, generalisation, lstm and mixture continue its rows if their options are the same."""

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True)(cls)

    @classmethod
    def of_preset(cls, preset: str) -> Self:
        """The options of a preset."""
        words = {"quick": cls.quick or cls.cpu, "cpu": cls.cpu, "paper": cls.paper}.get(preset, "")
        prog = f"bestresponse reproduce {cls.name}"
        return tyro.cli(cls, prog=prog, args=["--preset", preset, *shlex.split(words)])

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The options of the run in a folder."""
        config, names = runs.read_config(folder), {field.name for field in fields(cls)}
        kept: Row = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in names}
        return cls(**kept)

    def check(self) -> None:
        """Raise if an option is outside the range of its type, or if options contradict each other."""
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            _check_range(field.name, hints[field.name], getattr(self, field.name))

    @abstractmethod
    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        """Load the data, and return the tasks; raises if options do not fit the data."""

    def resumes(self) -> bool:
        """Whether the run continues the one in its folder."""
        return False

    def table(self, rows: list[Row]) -> list[Row]:
        """The final table: means and deviations over seeds."""
        return runs.mean_and_deviation(rows, self.by, self.of)

    @abstractmethod
    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        """One or two numbers of the table, by name."""

    def more(self, rows: list[Row]) -> Row:
        """Further entries of result.json; if "interrupted" is true, the command ends as an interrupt does."""
        folders = [row["folder"] for row in rows if "folder" in row]
        return {"folders": folders} if folders else {}

    def note(self, rows: list[Row]) -> str:
        """A text under the table."""
        return ""

    @abstractmethod
    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Draw the figures into the folder, from the rows of metrics.jsonl and other files there."""


class Repeated(Experiment):
    """An experiment that takes several seeds."""

    seeds: Count = 1  # The number of seeds; the table shows means and standard deviations over them.

    def all_seeds(self) -> range:
        """All seeds, in order."""
        return range(self.seed, self.seed + self.seeds)


def run(experiment: Experiment) -> Path:
    """Run an experiment, print its table and return its folder.

    Raises:
        ArgumentError: an option is out of its range, or options contradict each other.
        Error: data files are missing.
    """
    device, began = _checked(experiment), time.perf_counter()
    labels = [str(getattr(experiment, label)) for label in experiment.labels]
    folder = experiment.out or Path("runs") / "-".join([experiment.name, *labels])
    tasks = experiment.tasks(device, folder)
    config = {"experiment": experiment.name, **runs.as_json(experiment)}
    runs.begin(folder, config, [*experiment.figures, *experiment.files], experiment.resumes())
    rows = list(_rows(experiment, tasks, folder))
    table = experiment.table(rows)
    result = {"headline": experiment.headline(table, rows), "rows": table, "seed": experiment.seed}
    result |= {"versions": runs.versions(), "seconds": round(time.perf_counter() - began, 1)}
    result |= experiment.more(rows)
    result["metrics_sha256"] = runs.digest(folder)  # its figures carry the same, so that both can be matched
    happened = events(rows)
    result |= {"events": happened} if happened else {}
    runs.write_whole(folder / "result.json", result)
    parts = [
        _layout.table(table),
        experiment.note(rows),
        _layout.table(happened[:_SHOWN]) if happened else "",
    ]
    print("\n\n".join(filter(None, [*parts, f"written to {folder}"])))
    if (folder / "metrics.jsonl").is_file():
        draw(folder, type(experiment))
    if result.get("interrupted"):
        raise KeyboardInterrupt
    return folder


def _rows(experiment: Experiment, tasks: Tasks, folder: Path) -> Iterator[Row]:
    """The rows of all tasks, in order."""
    with closing(Bar(len(tasks), "task", shown=experiment.counted)) as bar:
        for task in tasks:
            for row in task():
                yield row if experiment.writes_history else runs.add(folder, row)
                bar.advance(0, ", ".join(f"{key} {row[key]}" for key in experiment.by if key in row))
            bar.advance()


def draw(folder: Path, kind: type[Experiment]) -> list[Path]:
    """Draw the figures of the run in a folder from its files alone, and return their paths: none without rows."""
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
        raise ArgumentError(f"--device must name a device of this machine; got {got}") from error
    require(device.type != "meta", "--device must name a device with memory; got 'meta'.")
    if experiment.threads:
        torch.set_num_threads(experiment.threads)
    return device


def _check_range(name: str, hint: Any, value: Any) -> None:
    values = value if isinstance(value, tuple) else (value,)
    option, shown = f"--{name.replace('_', '-')}", ", ".join(map(str, values)) or "none"
    once = bool(values) and len(set(values)) == len(values)
    require(once, f"{option} must have at least one value, and each only once; got {shown}.")
    for part in (hint, *get_args(hint)):
        for allowed in get_args(part):
            if isinstance(allowed, Range):
                require(all(x in allowed for x in values), f"{option} must be {allowed}; got {shown}.")
