"""The matrices in one hypergradient, with their shapes: the paper's figure 2."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import bestresponse as br

from .. import _tree
from ..errors import ArgumentError
from . import data, plots, regression
from .classification import squared_norm
from .experiment import Count, Experiment, Row, Tasks
from .minimise import flat_gradient, minimise

_SCALED = 4
_BLACK, _MAGENTA, _NEGATIVE = "#000000", "#b5178d", "#c8a878"
# The matrices in the order of their rows, with the colours of the paper; the others are black there.
_COLOURS = {
    "dL_V/dλ": plots.RED,
    "∂L_V/∂λ": plots.GREEN,
    "∂L_V/∂w": _BLACK,
    "(∂²L_T/∂w∂wᵀ)⁻¹": _MAGENTA,
    "∂²L_T/∂w∂λᵀ": _BLACK,
    "v = ∂L_V/∂w (∂²L_T/∂w∂wᵀ)⁻¹": plots.ORANGE,
    "∂w*/∂λ": plots.BLUE,
}
_DIFFERENCE = "largest difference from the library"


class Shapes(Experiment):
    """Draw every matrix of one hypergradient, with its shape and its entries.

    The model is a linear network on the diabetes set. The hyperparameters are a decay and scales of the first four
    features, which both losses read. The product of the matrices is compared with the library's hypergradient.
    """

    name = "shapes"
    labels = ()
    figures = ("shapes.png",)

    weight_steps: Count = 200  # L-BFGS iterations of the training.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        return [self._matrices]

    def _matrices(self) -> Iterator[Row]:
        """The product with its distance from the library's hypergradient, and each factor as a matrix."""
        torch.manual_seed(self.seed)
        x, y = data.load_table("diabetes")
        train, val = regression.halves(x, y)
        model, hyper = nn.Linear(x.shape[1], 1, dtype=x.dtype), _Scales()
        problem = br.Problem(model, hyper, _train_loss, _val_loss)
        weights = list(problem.weights.values())
        minimise(lambda: _train_loss(model, hyper, train), weights, self.weight_steps)
        everything = [*weights, *problem.hyperparameters.values()]
        sizes = [_tree.size(problem.weights), _tree.size(problem.hyperparameters)]
        by_weights, by_tuned = torch.split(
            flat_gradient(_val_loss(model, hyper, val), everything)[None], sizes, 1
        )
        gradient = flat_gradient(_train_loss(model, hyper, train), weights, create_graph=True)
        lines = torch.stack([flat_gradient(g, everything, retain_graph=True) for g in gradient])
        hessian, mixed = torch.split(lines, sizes, 1)
        inverse = torch.linalg.inv(hessian)
        total = by_tuned - by_weights @ inverse @ mixed
        library = _tree.flatten(br.hypergradient(problem, train, val, br.Implicit(br.Exact())).total)
        matrices = total, by_tuned, by_weights, inverse, mixed, by_weights @ inverse, -inverse @ mixed
        for number, (name, matrix) in enumerate(zip(_COLOURS, matrices, strict=True)):
            more = {} if number else {_DIFFERENCE: float((total - library).abs().max())}
            yield {
                "matrix": name,
                "entries": [[round(v, 6) for v in line] for line in matrix.tolist()],
            } | more

    def table(self, rows: list[Row]) -> list[Row]:
        shapes = [f"{len(row['entries'])} × {len(row['entries'][0])}" for row in rows]
        return [{"matrix": row["matrix"], "shape": shape} for row, shape in zip(rows, shapes, strict=True)]

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {_DIFFERENCE: rows[0][_DIFFERENCE]}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """The equation in three lines, with each matrix as a picture that has a cell for each entry."""
        entries = {row["matrix"]: np.array(row["entries"]) for row in rows}
        if entries.keys() != _COLOURS.keys():
            raise ArgumentError(
                f"{folder} must hold {len(_COLOURS)} matrices; got {len(entries)}. Run it again."
            )
        total, direct, gradient, inverse, mixed, product, response = entries
        lines = [
            [total, "=", direct, "+", gradient, response],
            ["", "=", direct, "−", gradient, inverse, mixed],
            ["", "=", direct, "−", product, mixed],
        ]
        with plots.panels(folder / self.figures[0], size=(10.0, 8.0)) as axes:
            panel = axes[0, 0]
            panel.axis("off")
            panel.set_aspect("equal")
            top = 0.0
            for line in lines:
                tall = max(entries[name].shape[0] for name in line if name in entries)
                left = 0.0
                for name in line:
                    if name in entries:
                        left = _place(panel, entries[name], name, left, top, tall)
                    else:
                        panel.text(left - 0.2, top - tall / 2, name, ha="center", va="center", fontsize=14)
                        left += 1.2 if name else entries[total].shape[1] + 1.5
                top -= tall + 5.0
            panel.set(xlim=(-1.0, 47.0), ylim=(top + 2.5, 2.5))


def _place(panel: Any, matrix: Any, name: str, left: float, top: float, tall: int) -> float:
    """Draw a matrix with cells of one unit, centred in a line of ``tall`` units; return the left edge of the next.

    Positive entries have the matrix's colour, and negative ones are brown.
    """
    down, across = map(int, matrix.shape)
    upper, middle = top - (tall - down) / 2, left + across / 2
    shown = np.tanh(matrix / (np.abs(matrix).mean() + 1e-12))
    box = (left, left + across, upper - down, upper)
    colour = _COLOURS[name]
    colours = LinearSegmentedColormap.from_list(name, [_NEGATIVE, "white", colour])
    panel.imshow(shown, cmap=colours, vmin=-1, vmax=1, extent=box, aspect="equal", interpolation="nearest")
    panel.add_patch(
        Rectangle((left, upper - down), across, down, fill=False, linewidth=1.4, edgecolor=colour)
    )
    title = name.replace("L_V", "$L_V$").replace("L_T", "$L_T$")
    panel.text(middle, upper + 0.4, title, ha="center", va="bottom", fontsize=9, color=colour)
    panel.text(middle, upper - down - 0.3, f"{down} × {across}", ha="center", va="top", fontsize=8)
    return left + across + 1.5


class _Scales(nn.Module):
    """Scales of the first features, and the logarithm of a decay for all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_SCALED, dtype=torch.float64))
        self.log_decay = nn.Parameter(torch.tensor(-3.0, dtype=torch.float64))


def _train_loss(model: nn.Module, hyper: Any, batch: regression.Batch) -> Tensor:
    squares = squared_norm(model)
    decay: Tensor = 0.5 * hyper.log_decay.exp() * squares
    return _val_loss(model, hyper, batch) + decay


def _val_loss(model: nn.Module, hyper: Any, batch: regression.Batch) -> Tensor:
    scaled = torch.cat([batch[0][:, :_SCALED] * hyper.scale, batch[0][:, _SCALED:]], dim=1)
    return regression.val_loss(model, hyper, (scaled, batch[1]))
