"""Whether many tuned hyperparameters hold on new data: five ways of tuning on ten settings, at equal CPU time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

import bestresponse as br

from . import plots
from .cells import Cell
from .experiment import Positive, Repeated, Row
from .generalisation_settings import settings
from .tuned_models import Network, Setting
from .ways_of_tuning import ERRORS, WAYS, Clock, mean_and_error, retrained

SettingName = Literal[
    "softmax-500",
    "softmax-2000",
    "mlp-500",
    "mlp-2000",
    "cnn",
    "lstm",
    "diabetes",
    "breast-cancer",
    "wine",
    "digits",
]
WayName = Literal["defaults", "few by Optuna", "few", "many", "many with help"]
_COLOURS = dict(
    zip(get_args(WayName), (plots.GREY, plots.ORANGE, plots.BLUE, plots.PURPLE, plots.RED), strict=True)
)
_HELPED = "many with help"
# The pairs of ways that are compared, with the names of their differences.
_PAIRS = {"help − few": (_HELPED, "few"), "help − Optuna": (_HELPED, "few by Optuna")}


class Generalisation(Repeated):
    """Compare few and many tuned hyperparameters on new data, with the same CPU time for each way of tuning.

    The ways: defaults; few hyperparameters by Optuna's TPE; few by hypergradients; many by hypergradients; many with
    help, which loosens them from the few only while unseen examples allow. Then new weights are trained on all training
    and validation examples, and measured on the test examples. A finished row is kept: if a run is stopped, the same
    command continues it. The preset quick takes ten minutes, with six settings, two seeds and a third of the time for
    each row.
    """

    name = "generalisation"
    quick = "--no-stand-ins --seeds 2 --budget 0.35 --settings diabetes breast-cancer wine digits softmax-500 mlp-500"
    cpu = "--no-stand-ins --seeds 5 --budget 1"
    paper = "--no-stand-ins --seeds 10 --budget 3"
    labels = ("preset",)
    figures = ("generalisation.png",)
    counted = True

    settings: tuple[SettingName, ...] = get_args(SettingName)  # The settings of the table.
    ways: tuple[WayName, ...] = get_args(WayName)  # The ways of tuning.
    stand_ins: bool = True
    """Use data that comes with packages in place of MNIST, CIFAR-10 and the Penn TreeBank, at sizes of seconds."""
    hessian: bool = True
    """Keep the Hessian for networks. False takes Implicit() as it is, which goes over to Gauss-Newton there."""
    budget: Positive = 0.01
    """The CPU time of a row in units of its setting's: 8 s for tables, 20 s for digits, 25 s for MNIST, 80 s
    for CIFAR-10 and 60 s for the Penn TreeBank. A step that has begun is finished."""

    def tasks(self, device: torch.device, folder: Path) -> Sequence[Cell]:
        known = settings(self.data_dir, self.stand_ins)
        if self.hessian:
            method = partial(br.Implicit, curvature=br.Hessian())
            known = {n: replace(x, method=method) if isinstance(x, Network) else x for n, x in known.items()}
        for name in self.settings:
            known[name].data(self.seed)  # raises if files are missing
        return [
            Cell(
                self,
                f"{name} {way}",
                seed,
                folder,
                partial(self._row, known[name], way),
                ("settings", "ways"),
            )
            for name in self.settings
            for seed in self.all_seeds()
            for way in self.ways
        ]

    def _row(self, setting: Setting, way: WayName, cell: Cell) -> Row:
        """Tune in one way, retrain on all examples, and measure on the test examples."""
        examples, test = setting.data(cell.seed)
        clock = Clock(self.budget * setting.seconds)
        found = WAYS[way](setting, examples, clock, cell.seed)
        row: Row = {"setting": setting.name, "way": way, "seconds": clock.spent}
        row["hyperparameters"] = sum(p.numel() for p in found.hyper.parameters())
        row["test loss"] = float(retrained(setting, found.hyper, examples, test, cell.seed).mean())
        return row | found.notes

    def table(self, rows: list[Row]) -> list[Row]:
        """For each setting, the mean test loss of each way with its standard error over seeds, and two differences."""
        found = []
        for name in dict.fromkeys(row["setting"] for row in rows):
            losses = _losses(rows, name)
            line: Row = {"setting": name}
            for way, by_seed in losses.items():
                line |= _mean(way, list(by_seed.values()))
            for label, pair in _PAIRS.items():
                line |= _mean(label, _differences(losses, *pair))
            found.append(line)
        return found

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        """The number of settings in which many with help are better or worse by two standard errors."""
        verdicts: Row = {"settings": len(table)}
        for label in _PAIRS:
            for word, sign in (("better", -1.0), ("worse", 1.0)):
                verdicts[f"{label}, {word}"] = sum(sign * _standard(line, label) > ERRORS for line in table)
        return verdicts

    def note(self, rows: list[Row]) -> str:
        numbers = self.headline(self.table(rows), rows)
        return (
            "test loss after retraining; ± is the standard error over seeds\n"
            f"many with help against few: better in {numbers['help − few, better']} of {numbers['settings']} settings, "
            f"worse in {numbers['help − few, worse']}; behind Optuna in {numbers['help − Optuna, worse']} "
            f"(by more than {ERRORS:g} standard errors)"
        )

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """For each setting, the test loss of each way relative to that of few, with two standard errors."""
        names = list(dict.fromkeys(row["setting"] for row in rows))
        with plots.panels(folder / self.figures[0], size=(9.0, 4.2)) as ((axes,),):
            axes.axhline(0.0, color=plots.GREY, linewidth=0.8)
            for number, (way, colour) in enumerate(_COLOURS.items()):
                points = []
                for place, name in enumerate(names):
                    ratios = _relative(_losses(rows, name), way)
                    if ratios:
                        mean, error = mean_and_error(Tensor(ratios)) if len(ratios) > 1 else (ratios[0], 0.0)
                        points.append((place + 0.14 * (number - 2), 100 * mean, 100 * ERRORS * error))
                if points:
                    x, y, bars = zip(*points, strict=True)
                    axes.errorbar(x, y, bars, fmt="o", color=colour, label=way, markersize=4, capsize=2)
            axes.set_xticks(range(len(names)), names, rotation=20)
            axes.set_yscale("symlog", linthresh=10)
            plots.style(
                axes, "", "test loss against few [%]", "negative is better; bars: two standard errors"
            )
            plots.legend_below(axes, 5)


def _losses(rows: Sequence[Row], setting: str) -> dict[str, dict[int, float]]:
    """The test losses by way and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["setting"] == setting:
            found.setdefault(row["way"], {})[row["seed"]] = row["test loss"]
    return found


def _differences(losses: Mapping[str, Mapping[int, float]], one: str, other: str) -> list[float]:
    """The difference of two ways for each seed that both have."""
    first, second = losses.get(one, {}), losses.get(other, {})
    return [first[seed] - second[seed] for seed in first if seed in second]


def _relative(losses: Mapping[str, Mapping[int, float]], way: str) -> list[float]:
    """The test loss of a way relative to that of few, less one, for each seed."""
    own, few = losses.get(way, {}), losses.get("few", {})
    return [own[seed] / few[seed] - 1.0 for seed in own if seed in few]


def _mean(name: str, values: Sequence[float]) -> Row:
    """The mean, and its standard error if there are several values."""
    if not values:
        return {name: None}
    if len(values) == 1:
        return {name: values[0]}
    mean, error = mean_and_error(torch.tensor(values, dtype=torch.float64))
    return {name: mean, f"{name} ±": error}


def _standard(line: Row, name: str) -> float:
    """A difference in standard errors; 0 if it or its error is unknown."""
    mean, error = line.get(name), line.get(f"{name} ±")
    return 0.0 if mean is None or error is None else mean / error
