"""The error of approximate hypergradients: the paper's figure 3."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import bestresponse as br

from .. import _tree
from . import data, plots, runs
from .experiment import Count, LogDecay, Positive, Repeated, Row, Tasks, require
from .regression import halves, train_loss, val_loss

# The colour of each method, and the method itself for a number of steps.
METHODS: dict[str, tuple[str, Callable[[int, float], br.Method]]] = {
    "identity": (plots.GREY, lambda n, scale: br.Implicit(br.Identity())),
    "Neumann": (plots.BLUE, lambda n, scale: br.Implicit(br.Neumann(n, scale))),
    "conjugate gradient": (plots.RED, lambda n, _: br.Implicit(br.ConjugateGradient(n, tolerance=0.0))),
    "conjugate gradient, recycled": (
        plots.GREEN,
        lambda n, _: br.Implicit(br.ConjugateGradient(n, tolerance=0.0, recycle=20), warm_start=True),
    ),
}


class InverseError(Repeated):
    """Compare hypergradients of approximate inverses with the exact one, while a linear network is tuned.

    The weights have one decay each, and the run follows the exact hypergradient. At each hyper-step every approximation
    is compared with it, by cosine similarity and ℓ2 distance (the paper's figure 3). A recycled solver learns from its
    own earlier solves in this run. The last columns of the table compare Neumann with conjugate gradient: the share of
    hyper-steps in which Neumann has the greater cosine, and that in which conjugate gradient has the smaller distance.
    """

    name = "inverse-error"
    cpu = "--threads 0 --data boston --seeds 5 --inversion-steps 1 2 3 5 8 12 20"
    paper = f"{cpu} --steps 500"
    figures = ("inverse_error.png",)
    by, of = ("method", "inversion steps"), ("products", "cosine", "distance")
    counted = True

    data: Literal["diabetes", "boston"] = "diabetes"
    """The regression set. diabetes comes with scikit-learn; boston (the paper's) is read from --data-dir."""
    steps: Count = 100  # Hyper-steps.
    weight_steps: Count = 5  # Steps of gradient descent before each hyper-step.
    weight_rate: Positive = 0.05
    """The learning rate of the weights and, as in the paper, the scale of the Neumann series."""
    hyper_rate: Positive = 0.05  # RMSprop's learning rate for the logarithms of the decays.
    initial_log_decay: LogDecay = -4.0  # The natural logarithm of each decay at the start.
    inversion_steps: tuple[Count, ...] = (1, 2, 5, 10)
    """The numbers of Neumann terms and conjugate-gradient steps to compare."""
    shown: int = 5  # The number of inversion steps for the curves over the run; one of --inversion-steps.

    def check(self) -> None:
        super().check()
        known = self.inversion_steps
        message = f"--shown must be one of --inversion-steps, {known}; got {self.shown}."
        require(self.shown in known, message)

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        x, y = (part.to(device) for part in data.load_table(self.data, self.data_dir))
        return [partial(self._follow, seed, x, y) for seed in self.all_seeds()]

    def _follow(self, seed: int, x: Tensor, y: Tensor) -> Iterator[Row]:
        """One run along the exact hypergradient: a row for each approximation at each hyper-step."""
        torch.manual_seed(seed)
        train, val = halves(x, y)
        model = nn.Linear(x.shape[1], 1, device=x.device, dtype=x.dtype)
        initial = torch.tensor(self.initial_log_decay).exp().item()
        decay = br.hyperparameters.WeightDecay(model, initial=initial)
        problem = br.Problem(model, decay, train_loss, val_loss)
        methods = {
            (name, steps): make(steps, self.weight_rate)
            for name, (_, make) in METHODS.items()
            for steps in (self.inversion_steps if name != "identity" else (0,))
        }
        tuner = br.Tuner(
            problem,
            torch.optim.SGD(problem.weights.values(), self.weight_rate),
            torch.optim.RMSprop(decay.parameters(), self.hyper_rate),
            br.Implicit(br.Exact()),
            weight_steps=self.weight_steps,
            seed=seed,
        )
        for step in range(1, self.steps + 1):
            tuner.fit([train], [val], 1)
            exact = _tree.flatten(br.hypergradient(problem, train, val, tuner.method).total)
            for (name, steps), method in methods.items():
                result = br.hypergradient(problem, train, val, method)
                found = _tree.flatten(result.total)
                yield {
                    "seed": seed,
                    "hyper_step": step,
                    "method": name,
                    "inversion steps": steps,
                    "products": result.solve.products if result.solve else 0,
                    "cosine": torch.cosine_similarity(found, exact, dim=0).item(),
                    "distance": (found - exact).norm().item(),
                    "exact norm": exact.norm().item(),
                }

    def table(self, rows: list[Row]) -> list[Row]:
        """Means over each run, their mean and deviation over seeds, and how often each of the two methods is ahead."""
        of_seed = runs.mean_and_deviation(rows, [*self.by, "seed"], self.of)
        table = runs.mean_and_deviation(of_seed, self.by, self.of)
        of_cg = {_solve(row): row for row in rows if row["method"] == "conjugate gradient"}
        pairs = [(row, of_cg[_solve(row)]) for row in rows if row["method"] == "Neumann"]
        pairs = [pair for pair in pairs if None not in (*pair[0].values(), *pair[1].values())]
        for row in (row for row in table if row["method"] == "Neumann"):
            both = [(n, cg) for n, cg in pairs if n["inversion steps"] == row["inversion steps"]]
            if both:  # otherwise every pair has a diverged solve
                row["Neumann ahead, cosine"] = statistics.fmean(n["cosine"] > cg["cosine"] for n, cg in both)
                row["CG ahead, distance"] = statistics.fmean(cg["distance"] < n["distance"] for n, cg in both)
        return table

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        shown = [row for row in table if row["inversion steps"] == self.shown]
        return {f"cosine, {row['method']}": row["cosine"] for row in shown}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Cosine and distance over hyper-steps and over inversion steps, as in the paper's figure 3."""
        look: dict[str, Any] = {"sharex": "col", "sharey": "row"}
        with plots.panels(folder / self.figures[0], 2, 2, (8.0, 5.6), **look) as axes:
            for (along, means), key in zip(axes, ("cosine", "distance"), strict=True):
                for name, (colour, _) in METHODS.items():
                    of = [row for row in rows if row["method"] == name]
                    shown = [row for row in of if row["inversion steps"] in (0, self.shown)]
                    plots.curve(along, shown, "hyper_step", key, band=_extremes, color=colour, label=name)
                    if name == "identity":
                        level = statistics.fmean(row[key] for row in of)
                        means.axhline(level, color=colour, linewidth=1.8)
                        continue
                    of = runs.mean_and_deviation(of, ["inversion steps", "seed"], [key])
                    more: Row = {"band": _extremes, "color": colour, "markersize": 3.5}
                    plots.curve(means, of, "inversion steps", key, "o-", **more)
            plots.style(axes[0, 0], "", "cosine similarity", f"{self.shown} inversion steps")
            plots.style(axes[0, 1], "", "", "mean over the run")
            plots.style(axes[1, 0], "hyper-steps", "ℓ2 distance")
            plots.style(axes[1, 1], "inversion steps", "")
            axes[1, 0].set_yscale("log")
            plots.legend_below(axes[0, 0], 4, size=9)


def _solve(row: Row) -> tuple[int, int, int]:
    """The identity of a solve within the run, without its method."""
    return row["inversion steps"], row["seed"], row["hyper_step"]


def _extremes(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)
