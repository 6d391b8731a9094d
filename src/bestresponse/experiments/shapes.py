"""The matrices in one hypergradient, with their shapes: the paper's figure 2."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import _tree
from ..curvatures import Hessian
from ..errors import ArgumentError
from ..methods import Implicit, hypergradient
from ..problem import Problem
from ..solvers import Exact
from ..solvers.direct import dense
from . import data, plots, runs
from .options import Options, Preset

Batch = tuple[Tensor, Tensor]

_SCALED = 4
_MATRICES = 6


@dataclass(kw_only=True)
class Shapes(Options):
    """Draw every matrix of one hypergradient, with its shape and its entries.

    A linear network on the diabetes set. Scales of the first four features, which both losses see, and a decay are
    tuned. What the matrices multiply to is compared with the library's answer.
    """

    weight_steps: int = 200
    """L-BFGS iterations of the training."""


PRESETS: dict[Preset, Shapes] = {
    "smoke": Shapes(),
    "cpu": Shapes(preset="cpu", threads=0),
    "paper": Shapes(preset="paper", threads=0),
}


class _Scales(nn.Module):
    """Scales of the first features, and a logarithmic decay for all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_SCALED, dtype=torch.float64))
        self.log_decay = nn.Parameter(torch.tensor(-3.0, dtype=torch.float64))


def run(config: Shapes) -> Path:
    """Run the experiment and return its folder."""
    config.begin(("weight_steps",), several=False)
    folder = config.out or Path("runs/shapes")
    record = runs.Run(folder, "shapes", config, figures=["shapes.png"])
    matrices, found = _matrices(config)
    for name, matrix in matrices.items():
        record.write({"matrix": name, "entries": [[round(v, 6) for v in line] for line in matrix.tolist()]})
    draw(folder, runs.read_config(folder), runs.read_rows(folder))
    difference = float((matrices["dL_V/dλ"] - found).abs().max())
    table = [
        {"matrix": name, "shape": " × ".join(map(str, matrix.shape))} for name, matrix in matrices.items()
    ]
    record.finish({"largest difference from the library": difference}, table, config.seed)
    return folder


def _matrices(config: Shapes) -> tuple[dict[str, Tensor], Tensor]:
    """Each factor as a matrix, and the library's hypergradient as a row."""
    torch.manual_seed(config.seed)
    x, y = data.load_table("diabetes")
    train, val = ((x[rows], y[rows]) for rows in torch.randperm(len(x)).chunk(2))
    model, hyper = nn.Linear(x.shape[1], 1, dtype=x.dtype), _Scales()
    problem = Problem(model, hyper, _train_loss, _val_loss)
    weights, tuned = list(problem.weights.values()), list(problem.hyperparameters.values())
    optimizer = torch.optim.LBFGS(weights, max_iter=config.weight_steps, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = _train_loss(model, hyper, train)
        torch.autograd.backward(loss, inputs=weights)
        return loss.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    gradients = torch.autograd.grad(_val_loss(model, hyper, val), [*weights, *tuned], allow_unused=True)
    rows = [
        torch.zeros_like(p) if g is None else g for p, g in zip([*weights, *tuned], gradients, strict=True)
    ]
    by_weights, by_tuned = (
        torch.cat([g.flatten() for g in part])[None] for part in (rows[: len(weights)], rows[len(weights) :])
    )
    with problem.undisturbed() as passes:
        system = Hessian().linearise(passes, train)
        like = _tree.zeros_like(problem.weights)
        inverse = torch.linalg.inv(dense(system, like))
        lines = []
        for unit in torch.eye(len(inverse), dtype=inverse.dtype):
            parts = system.mixed(_tree.unflatten(unit, like), last=False)
            pairs = zip(parts.values(), tuned, strict=True)
            lines.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    mixed = torch.stack(lines)
    total = by_tuned - by_weights @ inverse @ mixed
    h = hypergradient(problem, train, val, Implicit(Exact()))
    matrices = {
        "dL_V/dλ": total,
        "∂L_V/∂λ": by_tuned,
        "∂L_V/∂w": by_weights,
        "(∂²L_T/∂w∂wᵀ)⁻¹": inverse,
        "∂²L_T/∂w∂λᵀ": mixed,
        "v = ∂L_V/∂w (∂²L_T/∂w∂wᵀ)⁻¹": by_weights @ inverse,
    }
    return matrices, torch.cat([g.flatten() for g in h.total.values()])[None]


def _predict(model: nn.Module, hyper: nn.Module, inputs: Tensor) -> Tensor:
    scaled = inputs[:, :_SCALED] * hyper.get_parameter("scale")
    outputs: Tensor = model(torch.cat([scaled, inputs[:, _SCALED:]], dim=1))
    return outputs.squeeze(1)


def _train_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    squares = torch.stack([w.square().sum() for w in model.parameters()]).sum()
    return _val_loss(model, hyper, batch) + 0.5 * hyper.get_parameter("log_decay").exp() * squares


def _val_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    error = _predict(model, hyper, batch[0]) - batch[1]
    return error.square().mean()


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """The equation as pictures of its matrices, a cell for each entry, on two lines."""
    path = folder / "shapes.png"
    entries = {row["matrix"]: np.array(row["entries"]) for row in rows}
    if len(entries) < _MATRICES:
        raise ArgumentError(
            f"{folder} must hold {_MATRICES} matrices to draw; got {len(entries)}. Run it again."
        )
    total, direct, gradient, inverse, mixed, product = entries
    lines = [[total, "=", direct, "−", gradient, inverse, mixed], ["", "=", direct, "−", product, mixed]]
    with plots.panels(path, 1, 1, (10.0, 5.2)) as axes:
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
        panel.set_xlim(-1.0, 47.0)
        panel.set_ylim(top + 2.5, 2.5)
    return [path]


def _place(panel: Any, matrix: Any, name: str, left: float, top: float, tall: int) -> float:
    """Draw a matrix in cells of one unit, in the middle of a line of ``tall`` units; the left edge of what follows."""
    down, across = map(int, matrix.shape)
    upper = top - (tall - down) / 2
    shown = np.tanh(matrix / (np.abs(matrix).mean() + 1e-12))
    box = (left, left + across, upper - down, upper)
    panel.imshow(shown, cmap="RdBu", vmin=-1, vmax=1, extent=box, aspect="equal", interpolation="nearest")
    panel.plot(
        [box[0], box[1], box[1], box[0], box[0]],
        [box[2], box[2], box[3], box[3], box[2]],
        color="black",
        lw=0.8,
    )
    panel.text(
        left + across / 2,
        upper + 0.4,
        name.replace("L_V", "$L_V$").replace("L_T", "$L_T$"),
        ha="center",
        va="bottom",
        fontsize=9,
    )
    panel.text(left + across / 2, upper - down - 0.3, f"{down} × {across}", ha="center", va="top", fontsize=8)
    return left + across + 1.5
