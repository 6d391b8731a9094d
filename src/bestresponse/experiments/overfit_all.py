"""The overfitting experiment for every network and data set: the paper's figure 5 and its appendix in one figure."""

from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from .. import _layout
from . import cost, data, experiment, plots, runs
from .cells import Cell
from .experiment import Count, LogDecay, Number, Positive, Repeated, Row, Tasks
from .overfit import Overfit, draw_errors


class OverfitAll(Repeated):
    """Overfit the validation set with each network on each data set, and draw all runs side by side.

    Every run has its own folder. If the experiment is stopped, the same command skips the finished runs. See
    `bestresponse reproduce overfit --help` for the options.
    """

    name = "overfit-all"
    cpu = "--threads 0 --data mnist cifar10 --model linear mlp lenet --steps 80 --weight-rate 3e-4"
    paper = (
        "--threads 0 --data mnist cifar10 --model linear mlp lenet alexnet resnet44 --method neumann --terms 3 "
        "--scale 1e-4 --steps 20000 --weight-steps 1 --weight-rate 1e-4 --hyper-rate 1e-2 --initial-log-decay -8"
    )
    labels = ()
    figures = ("errors.png",)
    by = ("data", "model", "hyperparameters")
    of = ("train error", "validation error", "test error", "seconds", "time / plain")

    data: tuple[Literal["digits", "mnist", "cifar10"], ...] = ("digits",)
    """The data sets, one per row of the figure."""
    model: tuple[Literal["linear", "mlp", "lenet", "alexnet", "resnet44"], ...] = ("linear", "mlp")
    """The networks, one per column of the figure."""
    method: Literal["implicit", "neumann"] = "implicit"  # The recommended method, or the paper's.
    terms: Count = 20  # The number of Neumann terms.
    scale: Positive = 0.1  # The step α of neumann.
    steps: Count = 150  # Hyper-steps of each run.
    weight_steps: Count = 10  # Weight steps before each hyper-step.
    weight_rate: Positive = 1e-3  # Adam's learning rate for the weights.
    hyper_rate: Positive = 0.1  # RMSprop's learning rate for the logarithms of the decays.
    initial_log_decay: LogDecay = -6.0  # The natural logarithm of each decay at the start.
    test_size: Number = 0  # Test examples, for the figure and for the table; 0 means all.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        names = {field.name for field in fields(Overfit)} & {field.name for field in fields(self)}
        shared = {name: getattr(self, name) for name in names - {"preset"}}
        shared["data_dir"] = data.folder_of(self.data_dir)

        def row(images: str, model: str, cell: Cell) -> Row:
            own = {"data": images, "model": model, "seed": cell.seed, "out": cell.folder}
            experiment.run(Overfit(**{**shared, **own}))
            result = runs.read_json(cell.folder / "result.json")
            return {"data": images, "model": model, **result["rows"][0], "seconds": result["seconds"]}

        no_effect = ("data", "model")  # they are in the row's name
        return [
            Cell(self, f"{images}-{model}", seed, folder, partial(row, images, model), no_effect)
            for images, model, seed in product(self.data, self.model, self.all_seeds())
        ]

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {"largest validation error": max(row["validation error"] for row in table)}

    def note(self, rows: list[Row]) -> str:
        return _layout.fold(cost.NOTE)

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """The error curves of the first seed, a panel for each run: data sets as rows, networks as columns."""
        down, across = len(self.data), len(self.model)
        size = (2.6 * across + 0.4, 2.3 * down + 0.4)
        with plots.panels(folder / self.figures[0], down, across, size, sharex=True, sharey=True) as axes:
            for row in (row for row in rows if row["seed"] == self.seed):
                panel = axes[self.data.index(row["data"]), self.model.index(row["model"])]
                draw_errors(panel, runs.read_rows(folder / row["folder"]), f"{row['model']}, {row['data']}")
                panel.label_outer()
            axes[0, -1].legend(fontsize=8)
