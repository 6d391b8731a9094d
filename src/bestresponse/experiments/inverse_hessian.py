"""The inverse of a training Hessian, approximate and exact: the paper's figure 4."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

import bestresponse as br

from .. import _tree
from ..solvers.direct import dense
from . import data, plots
from .experiment import Count, LogDecay, Number, Repeated, Row, Tasks
from .minimise import minimise
from .regression import Batch, train_loss, val_loss


class InverseHessian(Repeated):
    """Invert the training Hessian of a one-hidden-layer network by Neumann series and exactly, and show the entries.

    The network is trained on a regression set with weight decay, until its gradient is small. The library's solvers
    compute each inverse column by column. The figure shows tanh of the entries, in units of the mean of each diagonal
    (the paper's figure 4).
    """

    name = "inverse-hessian"
    cpu = "--threads 0 --data boston --seeds 3 --hidden 10"
    paper = "--threads 0 --data boston --hidden 15"
    figures = ("inverse_hessian.png",)
    by = ("inverse", "weights")
    of = ("gradient norm", "cosine", "relative distance", "smallest eigenvalue", "largest eigenvalue")
    counted = True

    data: Literal["diabetes", "boston"] = "diabetes"
    """The regression set. diabetes comes with scikit-learn; boston (the paper's) is read from --data-dir."""
    hidden: Count = 5  # Hidden units.
    terms: tuple[Number, ...] = (1, 5)  # The numbers of Neumann terms to compare.
    steps: Count = 500  # L-BFGS iterations of the training.
    log_decay: LogDecay = -3.0  # The natural logarithm of the weight decay.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        x, y = (part.to(device) for part in data.load_table(self.data, self.data_dir))
        return [partial(self._inverses, seed, (x, y)) for seed in self.all_seeds()]

    def _inverses(self, seed: int, batch: Batch) -> Iterator[Row]:
        """The exact inverse and the approximate ones; the first seed's rows have their entries."""
        problem, gradient_norm = self._trained(seed, batch)
        with problem.undisturbed() as passes:
            system = br.Hessian().linearise(passes, batch)
            like = _tree.zeros_like(problem.weights)
            hessian = dense(system, like)
            eigenvalues = torch.linalg.eigvalsh(hessian)
            exact = torch.linalg.inv(hessian)
            inverses = {"exact": exact}
            for terms in self.terms:
                solver = br.Neumann(terms, 1.0 / float(eigenvalues[-1]))
                columns = partial(lambda solver, unit: solver.solve(system, unit).x, solver)
                inverses[f"Neumann, {terms} term{'s' if terms > 1 else ''}"] = dense(columns, like)
        for name, inverse in inverses.items():
            row = {
                "seed": seed,
                "inverse": name,
                "weights": len(hessian),
                "gradient norm": gradient_norm,
                "cosine": float((inverse * exact).sum() / inverse.norm() / exact.norm()),
                "relative distance": float((inverse - exact).norm() / exact.norm()),
                "smallest eigenvalue": float(eigenvalues[0]),
                "largest eigenvalue": float(eigenvalues[-1]),
            }
            if seed == self.seed:
                row["entries"] = [[round(v, 5) for v in line] for line in inverse.tolist()]
            yield row

    def _trained(self, seed: int, batch: Batch) -> tuple[br.Problem, float]:
        """A network at a minimum of its training loss, and the norm of the gradient there."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(batch[0].shape[1], self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))
        model = model.to(batch[0].device, batch[0].dtype)
        decay = br.hyperparameters.WeightDecay(model, per="global", initial=math.exp(self.log_decay))
        problem = br.Problem(model, decay, train_loss, val_loss)
        until = {"tolerance_grad": 1e-9, "tolerance_change": 0.0}
        weights = problem.weights.values()
        return problem, minimise(lambda: train_loss(model, decay, batch), weights, self.steps, **until)

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {f"cosine, {row['inverse']}": row["cosine"] for row in table}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Tanh of the entries of each inverse, in units of its mean diagonal entry, as in the paper's figure 4."""
        shown = sorted((row for row in rows if "entries" in row), key=lambda row: row["inverse"] == "exact")
        size = (3.0 * len(shown) + 0.6, 3.3)
        with plots.panels(folder / self.figures[0], 1, len(shown), size) as axes:
            for panel, row in zip(axes[0], shown, strict=True):
                entries = np.asarray(row["entries"])
                unit = float(entries.diagonal().mean())
                picture = panel.imshow(np.tanh(entries / unit), cmap="RdBu", vmin=-1, vmax=1)
                panel.set_title(f"{row['inverse']}\nunit {unit:.2g}", fontsize=10)
                panel.set_xlabel("weight")
            axes[0, 0].set_ylabel("weight")
            axes[0, 0].figure.colorbar(
                picture, ax=axes[0].tolist(), label="tanh of the entry in this unit", shrink=0.8
            )
