"""The inverse of a training Hessian, approximately and exactly: the paper's figure 4."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from .. import _tree
from ..curvatures import Hessian, Linearisation
from ..errors import ArgumentError
from ..hyperparameters import WeightDecay
from ..problem import Problem
from ..solvers import Neumann, Solver
from ..solvers.direct import dense
from . import data, plots, runs
from .options import Options, Preset
from .regression import Batch, train_loss, val_loss


@dataclass(kw_only=True)
class InverseHessian(Options):
    """Invert the training Hessian of a one-hidden-layer network by Neumann series and exactly, and show the entries.

    The network is trained until its gradient is small, on a regression set with a weight decay. Each inverse is
    that of the library's own solvers, column by column; the picture is tanh of its entries (the paper's figure 4).
    """

    data: Literal["diabetes", "boston"] = "diabetes"
    """The regression set. diabetes comes with scikit-learn; boston (the paper's) is read from --data-dir."""
    hidden: int = 10
    """Hidden units."""
    terms: tuple[int, ...] = (1, 5)
    """Neumann terms of the approximations."""
    steps: int = 500
    """L-BFGS iterations of the training."""
    log_decay: float = -3.0
    """The natural logarithm of the weight decay."""


PRESETS: dict[Preset, InverseHessian] = {
    "smoke": InverseHessian(hidden=5),
    "cpu": InverseHessian(preset="cpu", threads=0, data="boston", seeds=3),
    "paper": InverseHessian(preset="paper", threads=0, data="boston", seeds=3),
}


def run(config: InverseHessian) -> Path:
    """Run the experiment and return its folder."""
    device = config.begin(("hidden", "steps"), log_decays=("log_decay",))
    if not config.terms or min(config.terms) < 0:
        raise ArgumentError(f"--terms must be numbers ≥ 0; got {config.terms}.")
    x, y = (part.to(device) for part in data.load_table(config.data, config.data_dir))
    folder = config.out or Path("runs") / f"inverse-hessian-{config.data}"
    record = runs.Run(folder, "inverse-hessian", config, figures=["inverse_hessian.png"])
    for seed in config.all_seeds():
        for row in _inverses(config, seed, (x, y)):
            entries = row.pop("entries")
            # The picture is that of the first seed.
            shown = {"entries": [[round(v, 5) for v in line] for line in entries.tolist()]}
            record.write({"seed": seed, **row, **(shown if seed == config.seed else {})})
    rows = runs.read_rows(folder)
    draw(folder, runs.read_config(folder), rows)
    values = ["gradient norm", "cosine", "relative distance", "smallest eigenvalue", "largest eigenvalue"]
    table = runs.mean_and_deviation(rows, ["inverse", "weights"], values)
    headline = {f"cosine, {row['inverse']}": row["cosine"] for row in table}
    record.finish(headline, table, config.seed)
    return folder


def _inverses(config: InverseHessian, seed: int, batch: Batch) -> Iterator[dict[str, Any]]:
    """The exact inverse and the approximate ones, with their matrices."""
    problem = _trained(config, seed, batch)
    gradient = torch.autograd.grad(
        train_loss(problem.model, problem.hyper, batch), list(problem.weights.values())
    )
    gradient_norm = float(torch.cat([g.flatten() for g in gradient]).norm())
    with problem.undisturbed() as passes:
        system = Hessian().linearise(passes, batch)
        like = _tree.zeros_like(problem.weights)
        hessian = dense(system, like)
        eigenvalues = torch.linalg.eigvalsh(hessian)
        scale = 1.0 / float(eigenvalues[-1])
        exact = torch.linalg.inv(hessian)
        inverses = {"exact": exact}
        for terms in config.terms:
            columns = partial(_column, Neumann(terms, scale), system)
            inverses[f"Neumann, {terms} term{'s' if terms > 1 else ''}"] = dense(columns, like)
        for name, inverse in inverses.items():
            yield {
                "inverse": name,
                "weights": len(hessian),
                "gradient norm": gradient_norm,
                "cosine": float((inverse * exact).sum() / inverse.norm() / exact.norm()),
                "relative distance": float((inverse - exact).norm() / exact.norm()),
                "smallest eigenvalue": float(eigenvalues[0]),
                "largest eigenvalue": float(eigenvalues[-1]),
                "entries": inverse,
            }


def _column(solver: Solver, system: Linearisation, unit: _tree.Tree) -> _tree.Tree:
    return solver.solve(system, unit).x


def _trained(config: InverseHessian, seed: int, batch: Batch) -> Problem:
    """A network at a minimum of its training loss."""
    torch.manual_seed(seed)
    features = batch[0].shape[1]
    model = nn.Sequential(nn.Linear(features, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1))
    model = model.to(batch[0].device, batch[0].dtype)
    decay = WeightDecay(model, per="global", initial=math.exp(config.log_decay))
    problem = Problem(model, decay, train_loss, val_loss)
    optimizer = torch.optim.LBFGS(
        problem.weights.values(),
        max_iter=config.steps,
        tolerance_grad=1e-9,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = train_loss(model, decay, batch)
        torch.autograd.backward(loss, inputs=list(problem.weights.values()))
        return loss.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return problem


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Tanh of the inverses' entries side by side, on one colour scale: the paper's figure 4."""
    path = folder / "inverse_hessian.png"
    shown = sorted((row for row in rows if "entries" in row), key=lambda row: row["inverse"] == "exact")
    with plots.panels(path, 1, len(shown), (3.0 * len(shown) + 0.6, 3.3)) as axes:
        for panel, row in zip(axes[0], shown, strict=True):
            picture = panel.imshow(np.tanh(np.asarray(row["entries"])), cmap="RdBu", vmin=-1, vmax=1)
            panel.set_title(row["inverse"], fontsize=10)
            panel.set_xlabel("weight")
        axes[0, 0].set_ylabel("weight")
        axes[0, 0].figure.colorbar(picture, ax=axes[0].tolist(), label="tanh of the entry", shrink=0.8)
    return [path]
