"""How near approximate hypergradients come to the exact one: the paper's figure 3."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..hyperparameters import WeightDecay
from ..methods import Hypergradient, Implicit, Method, hypergradient
from ..problem import Problem
from ..solvers import ConjugateGradient, Exact, Identity, Neumann
from ..tuner import Tuner
from . import data, plots, runs
from .options import Options, Preset
from .regression import train_loss, val_loss

METHODS: dict[str, Callable[[int, float], Method]] = {
    "identity": lambda steps, scale: Implicit(Identity()),
    "Neumann": lambda steps, scale: Implicit(Neumann(steps, scale)),
    "conjugate gradient": lambda steps, scale: Implicit(ConjugateGradient(steps, tolerance=0.0)),
    "conjugate gradient, recycled": lambda steps, scale: Implicit(
        ConjugateGradient(steps, tolerance=0.0, recycle=20), warm_start=True
    ),
}
_COLOURS = dict(zip(METHODS, (plots.GREY, plots.BLUE, plots.RED, plots.GREEN), strict=True))


@dataclass(kw_only=True)
class InverseError(Options):
    """Compare hypergradients of approximate inverses with the exact one, while a linear network is tuned.

    Weights and a decay for each of them move together along the exact hypergradient; at each hyper-step every
    approximation is compared with it, by cosine similarity and ℓ2 distance (the paper's figure 3). A recycled
    solver learns from the solves that it made along this run. The table's last columns are the shares of the
    hyper-steps in which Neumann has the greater cosine, and conjugate gradient the smaller distance, of the two.
    """

    data: Literal["diabetes", "boston"] = "diabetes"
    """The regression set. diabetes comes with scikit-learn; boston (the paper's) is read from --data-dir."""
    steps: int = 100
    """Hyper-steps."""
    weight_steps: int = 5
    """Steps of gradient descent before each hyper-step."""
    weight_rate: float = 0.05
    """The learning rate of the weights; also the scale of the Neumann series, as in the paper."""
    hyper_rate: float = 0.05
    """RMSprop's learning rate for the logarithms of the decays."""
    initial_log_decay: float = -4.0
    """The natural logarithm of each decay at the start."""
    inversion_steps: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 20)
    """Neumann terms and conjugate-gradient steps to compare."""
    shown: int = 5
    """The inversion steps whose curve over the run is drawn; one of --inversion-steps."""


PRESETS: dict[Preset, InverseError] = {
    "smoke": InverseError(inversion_steps=(1, 2, 5, 10)),
    "cpu": InverseError(preset="cpu", threads=0, data="boston", seeds=5),
    "paper": InverseError(preset="paper", threads=0, data="boston", seeds=5, steps=500),
}


def run(config: InverseError) -> Path:
    """Run the experiment and return its folder."""
    positive = ("steps", "weight_steps", "weight_rate", "hyper_rate", "shown")
    device = config.begin(positive, log_decays=("initial_log_decay",))
    if min(config.inversion_steps, default=0) < 1:
        raise ArgumentError(f"--inversion-steps must be numbers ≥ 1; got {config.inversion_steps}.")
    if config.shown not in config.inversion_steps:
        raise ArgumentError(
            f"--shown must be one of --inversion-steps, {config.inversion_steps}; got {config.shown}."
        )
    x, y = (part.to(device) for part in data.load_table(config.data, config.data_dir))
    folder = config.out or Path("runs") / f"inverse-error-{config.data}"
    record = runs.Run(folder, "inverse-error", config, figures=["inverse_error.png"])
    for seed in config.all_seeds():
        _follow(config, seed, x, y, record)
    rows = runs.read_rows(folder)
    table = _table(rows)
    draw(folder, runs.read_config(folder), rows)
    best = [row for row in table if row["inversion steps"] == config.shown]
    record.finish({f"cosine, {row['method']}": row["cosine"] for row in best}, table, config.seed)
    return folder


def _follow(config: InverseError, seed: int, x: Tensor, y: Tensor, record: runs.Run) -> None:
    """One run along the exact hypergradient, and a row for each approximation at each hyper-step."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    train, val = ((x[rows], y[rows]) for rows in order.chunk(2))
    model = nn.Linear(x.shape[1], 1, device=x.device, dtype=x.dtype)
    decay = WeightDecay(model, initial=torch.tensor(config.initial_log_decay).exp().item())
    problem = Problem(model, decay, train_loss, val_loss)
    methods = {
        (name, steps): make(steps, config.weight_rate)
        for name, make in METHODS.items()
        for steps in (config.inversion_steps if name != "identity" else (0,))
    }
    exact_method = Implicit(Exact())

    def compare(tuner: Tuner) -> None:
        exact, rows = _flat(hypergradient(problem, train, val, exact_method)), []
        for (name, steps), method in methods.items():
            result = hypergradient(problem, train, val, method)
            found = _flat(result)
            row = {
                "seed": seed,
                "hyper_step": tuner.hyper_step,
                "method": name,
                "inversion steps": steps,
                "products": result.solve.products if result.solve else 0,
                "cosine": torch.cosine_similarity(found, exact, dim=0).item(),
                "distance": (found - exact).norm().item(),
                "exact norm": exact.norm().item(),
            }
            rows.append(row)
        record.write(*rows)

    tuner = Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), config.weight_rate),
        torch.optim.RMSprop(decay.parameters(), config.hyper_rate),
        exact_method,
        weight_steps=config.weight_steps,
        seed=seed,
        callbacks=[compare],
    )
    tuner.fit([train], [val], config.steps)


def _flat(h: Hypergradient) -> Tensor:
    return torch.cat([g.flatten() for g in h.total.values()])


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over each run, and their mean and deviation over seeds; how often either of the two is ahead."""
    keys, values = ["method", "inversion steps"], ["products", "cosine", "distance"]
    of_seed = runs.mean_and_deviation(rows, [*keys, "seed"], values)
    table = runs.mean_and_deviation(of_seed, keys, values)
    place = {(r["method"], r["inversion steps"], r["seed"], r["hyper_step"]): r for r in rows}
    pairs = [
        (row, place["conjugate gradient", row["inversion steps"], row["seed"], row["hyper_step"]])
        for row in rows
        if row["method"] == "Neumann"
    ]
    for row in table:
        if row["method"] == "Neumann":
            both = [(n, cg) for n, cg in pairs if n["inversion steps"] == row["inversion steps"]]
            both = [pair for pair in both if None not in (*pair[0].values(), *pair[1].values())]
            if not both:
                continue  # all of them diverged
            row["Neumann ahead, cosine"] = sum(n["cosine"] > cg["cosine"] for n, cg in both) / len(both)
            row["CG ahead, distance"] = sum(cg["distance"] < n["distance"] for n, cg in both) / len(both)
    return table


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Cosine and distance, over hyper-steps and over inversion steps: the axes of the paper's figure 3."""
    path = folder / "inverse_error.png"
    with plots.panels(path, 2, 2, (8.0, 5.6), sharex="col", sharey="row") as axes:
        for down, key in enumerate(("cosine", "distance")):
            for name, colour in _COLOURS.items():
                of_method = [row for row in rows if row["method"] == name]
                shown = [row for row in of_method if row["inversion steps"] in (0, config["shown"])]
                _curve(axes[down, 0], shown, "hyper_step", key, name, colour)
                if name == "identity":
                    level = statistics.fmean(row[key] for row in of_method)
                    axes[down, 1].axhline(level, color=colour, linewidth=1.8)
                else:
                    _curve(axes[down, 1], of_method, "inversion steps", key, name, colour)
        plots.style(axes[0, 0], "", "cosine similarity", f"{config['shown']} inversion steps")
        plots.style(axes[0, 1], "", "", "mean over the run")
        plots.style(axes[1, 0], "hyper-steps", "ℓ2 distance")
        plots.style(axes[1, 1], "inversion steps", "")
        axes[1, 0].set_yscale("log")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].figure.legend(
            handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )
    return [path]


def _curve(axes: Any, rows: list[dict[str, Any]], x: str, y: str, label: str, colour: str) -> None:
    """The mean over seeds, in a band from the smallest to the largest of them."""
    of_seed = runs.mean_and_deviation(rows, [x, "seed"], [y])
    at = sorted({row[x] for row in of_seed})
    values = [[row[y] for row in of_seed if row[x] == place] for place in at]
    line = "o-" if x == "inversion steps" else "-"
    means = [statistics.fmean(some) for some in values]
    axes.plot(at, means, line, color=colour, label=label, markersize=3.5, linewidth=1.8)
    if len(values[0]) > 1:
        axes.fill_between(
            at, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2, linewidth=0
        )
