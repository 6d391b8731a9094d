"""How much data to validate on, for one hyperparameter and for many: the paper's figure 7."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import t as student
from torch import nn
from tqdm import tqdm

from ..errors import ArgumentError
from ..hyperparameters import WeightDecay
from ..methods import Implicit
from ..problem import Problem
from ..tuner import Tuner
from . import data, plots, runs
from .classification import Batch, train_loss, val_loss
from .options import Options, Preset

Per = Literal["global", "weight"]
_KINDS: dict[Per, str] = {"global": "one decay", "weight": "a decay for each weight"}
_COLOURS = {"global": plots.BLUE, "weight": plots.RED}


@dataclass(kw_only=True)
class Split(Options):
    """Divide a fixed number of examples into training and validation data, and tune weight decay on each division.

    Softmax regression with one decay for all weights, and with one for each. The test accuracy is taken of the
    weights that were tuned along, and of weights trained anew on all the examples under the tuned decays
    (the paper's figure 7).
    """

    data: Literal["digits", "mnist"] = "digits"
    """The data set. digits comes with scikit-learn; mnist is read from --data-dir."""
    examples: int = 200
    """Training and validation examples together."""
    shares: tuple[float, ...] = (0.1, 0.5, 0.9)
    """The shares of them that are for validation."""
    steps: int = 60
    """Hyper-steps."""
    weight_steps: int = 10
    """Weight steps before each hyper-step."""
    weight_rate: float = 0.03
    """Adam's learning rate for the weights."""
    hyper_rate: float = 0.1
    """RMSprop's learning rate for the logarithms of the decays; it falls to zero along a cosine."""
    initial_log_decay: float = -4.0
    """The natural logarithm of each decay at the start."""


_NINE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PRESETS: dict[Preset, Split] = {
    "smoke": Split(),
    "cpu": Split(preset="cpu", threads=0, data="mnist", examples=500, shares=_NINE, seeds=5),
    "paper": Split(preset="paper", threads=0, data="mnist", examples=1000, shares=_NINE, seeds=10, steps=300),
}


def run(config: Split) -> Path:
    """Run the experiment and return its folder.

    Raises:
        ArgumentError: a share leaves no training or no validation examples, or an option is out of its range.
    """
    positive = ("examples", "steps", "weight_steps", "weight_rate", "hyper_rate")
    device = config.begin(positive, log_decays=("initial_log_decay",))
    sizes = {share: round(share * config.examples) for share in config.shares if 0 < share < 1}
    if (
        len(sizes) < max(1, len(config.shares))
        or not 0 < min(sizes.values()) <= max(sizes.values()) < config.examples
    ):
        raise ArgumentError(
            "--shares must differ and leave examples for training and for validation; got "
            f"{config.shares} of {config.examples}."
        )
    images = data.load(config.data, config.data_dir)
    images.draw(config.examples, seed=config.seed)  # raises where there are not so many
    test = images.x_test.flatten(1).to(device), images.y_test.to(device)
    folder = config.out or Path("runs") / f"split-{config.data}"
    record = runs.Run(folder, "split", config, figures=["split.png"])
    cells = [(seed, per, share) for seed in config.all_seeds() for per in _KINDS for share in sizes]
    for seed, per, share in tqdm(cells, unit="run"):
        ((x, y),) = images.draw(config.examples, seed=seed)
        whole = x.flatten(1).to(device), y.to(device)
        labels = {"seed": seed, "per": per, "share": share}
        record.write({**labels, **_tune(config, per, sizes[share], whole, test, images.classes)})
    rows = runs.read_rows(folder)
    table = runs.mean_and_deviation(
        rows, ["per", "share"], ["accuracy", "retrained accuracy", "validation accuracy"]
    )
    draw(folder, runs.read_config(folder), rows)
    headline = {}
    for per, kind in _KINDS.items():
        for key in ("accuracy", "retrained accuracy"):
            best = max((row for row in table if row["per"] == per), key=lambda row: row[key])
            headline[f"best share, {kind}, {key}"] = best["share"]
    record.finish(headline, table, config.seed)
    return folder


def _tune(config: Split, per: Per, size: int, whole: Batch, test: Batch, classes: int) -> dict[str, Any]:
    """Tune with the first ``size`` examples as validation data."""
    val, train = ((whole[0][rows], whole[1][rows]) for rows in (slice(size), slice(size, None)))
    model = nn.Linear(whole[0].shape[1], classes, device=whole[0].device, dtype=whole[0].dtype)
    _set_to_zero(model)
    decay = WeightDecay(model, per=per, initial=math.exp(config.initial_log_decay))
    problem = Problem(model, decay, train_loss, val_loss)
    optimizer = torch.optim.RMSprop(decay.parameters(), config.hyper_rate)
    tuner = Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), config.weight_rate),
        optimizer,
        Implicit(),
        weight_steps=config.weight_steps,
        hyper_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps),
    )
    tuner.fit([train], [val], config.steps)
    found = {"accuracy": _accuracy(model, test), "validation accuracy": _accuracy(model, val)}
    losses = tuner.retrain([whole], config.steps * config.weight_steps, _set_to_zero)
    return {**found, "retrained accuracy": _accuracy(model, test), "retrained loss": losses[-1]}


@torch.no_grad()
def _set_to_zero(model: nn.Module) -> None:
    for w in model.parameters():
        w.zero_()


@torch.no_grad()
def _accuracy(model: nn.Module, batch: Batch) -> float:
    return float(model(batch[0]).argmax(dim=1).eq(batch[1]).float().mean())


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Test accuracy against the share, solid with re-training on all the data: the axes of the paper's figure 7."""
    path = folder / "split.png"
    with plots.panels(path) as axes:
        for per, kind in _KINDS.items():
            for key, line, words in (
                ("retrained accuracy", "o-", "re-trained on all"),
                ("accuracy", "o--", "as tuned"),
            ):
                points = runs.mean_and_deviation([r for r in rows if r["per"] == per], ["share"], [key])
                at, mean = [100 * p["share"] for p in points], [100 * p[key] for p in points]
                axes[0, 0].plot(at, mean, line, color=_COLOURS[per], label=f"{kind}, {words}", markersize=4)
                points = [p for p in points if p.get(f"{key} ±") is not None]
                if points:
                    seeds = len({row["seed"] for row in rows})
                    quantile = float(student.ppf(0.975, seeds - 1))
                    half = [quantile * p[f"{key} ±"] / math.sqrt(seeds) for p in points]
                    low, high = (
                        [100 * (p[key] + sign * h) for p, h in zip(points, half, strict=True)]
                        for sign in (-1, 1)
                    )
                    at = [100 * p["share"] for p in points]
                    axes[0, 0].fill_between(at, low, high, color=_COLOURS[per], alpha=0.15, linewidth=0)
        title = f"{config['examples']} examples of {config['data']}"
        if len({row["seed"] for row in rows}) > 1:
            title += "; bands: 95 % intervals of the mean over seeds"
        plots.style(axes[0, 0], "examples for validation [%]", "test accuracy [%]", title)
        axes[0, 0].legend(frameon=False, fontsize=8)
    return [path]
