"""A problem with one weight and one hyperparameter, seen whole: the paper's figure 1."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..methods import Implicit, hypergradient
from ..problem import Problem
from ..solvers import Exact
from . import plots, runs
from .options import Options, Preset

_LIMITS = (-3.5, 1.0), (0.0, 1.2)


@dataclass(kw_only=True)
class BestResponse(Options):
    """Draw the training and the validation loss over one weight and one hyperparameter, with the best response on both.

    L_T = ½ (w − 1)² + ½ exp(λ) w², so that w*(λ) = 1 / (1 + exp(λ));  L_V = ½ (w − 0.6)² + 0.01 λ².
    The library's hypergradient at each point of the curve is compared with the derivative of L_V(w*(λ), λ).
    """

    points: int = 41
    """Points of the curve."""
    marked: float = -1.6
    """The λ at which the hypergradient is drawn."""


PRESETS: dict[Preset, BestResponse] = {
    "smoke": BestResponse(),
    "cpu": BestResponse(preset="cpu", threads=0),
    "paper": BestResponse(preset="paper", threads=0),
}


class _Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))


def run(config: BestResponse) -> Path:
    """Run the experiment and return its folder."""
    config.begin(("points",), several=False)
    folder = config.out or Path("runs/best-response")
    record = runs.Run(folder, "best-response", config, figures=["best_response.png"])
    worst = 0.0
    for place in [config.marked, *np.linspace(*_LIMITS[0], config.points)]:
        row = _point(float(place))
        worst = max(worst, abs(row["hypergradient"] - row["derivative"]))
        record.write(row)
    rows = runs.read_rows(folder)
    draw(folder, runs.read_config(folder), rows)
    table = [{"points": len(rows), "largest |hypergradient − derivative by hand|": worst}]
    record.finish({"largest difference": worst}, table, config.seed)
    return folder


def _point(place: float) -> dict[str, Any]:
    """The best response at λ, the library's hypergradient there, and the derivative by hand."""
    best = float(1.0 / (1.0 + np.exp(place)))
    problem = Problem(
        _Scalar(best),
        _Scalar(place),
        lambda model, hyper, batch: _train(model.value, hyper.value),
        lambda model, hyper, batch: _val(model.value, hyper.value),
    )
    h = hypergradient(problem, None, None, Implicit(Exact()))
    return {
        "hyperparameter": place,
        "best response": best,
        "training loss": float(_train(best, torch.tensor(place, dtype=torch.float64))),
        "validation loss": h.val_loss,
        "hypergradient": float(h.total["value"]),
        "direct": float(h.direct["value"]),
        "indirect": float(h.indirect["value"]),
        "derivative": (best - 0.6) * -best * (1.0 - best) + 0.02 * place,
    }


def _train(w: Any, place: Any) -> Tensor:
    loss: Tensor = 0.5 * (w - 1.0) ** 2 + 0.5 * torch.exp(place) * w**2
    return loss


def _val(w: Any, place: Any) -> Tensor:
    loss: Tensor = 0.5 * (w - 0.6) ** 2 + 0.01 * place**2
    return loss


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Both surfaces with the best response on them, and the hypergradient as the slope of the curve."""
    path = folder / "best_response.png"
    marked, curve = rows[0], sorted(rows[1:], key=lambda row: row["hyperparameter"])
    grid = np.meshgrid(np.linspace(*_LIMITS[0], 60), np.linspace(*_LIMITS[1], 60))
    places, weights = (torch.from_numpy(x) for x in grid)
    at = {key: np.array([row[key] for row in curve]) for key in curve[0]}
    surfaces = (("training loss", _train), ("validation loss", _val))
    with plots.panels(
        path, 1, 2, (10.0, 4.6), subplot_kw={"projection": "3d", "computed_zorder": False}
    ) as axes:
        for panel, (name, loss) in zip(axes[0], surfaces, strict=True):
            panel.plot_surface(
                *grid, loss(weights, places).numpy(), cmap="GnBu", alpha=0.6, linewidth=0, zorder=0
            )
            panel.plot(
                at["hyperparameter"], at["best response"], at[name], color=plots.BLUE, linewidth=2.5,
                label="best response w*(λ)" if loss is _train else "$L_V$(w*(λ), λ)", zorder=2,
            )  # fmt: skip
            here = marked["hyperparameter"], marked["best response"], marked[name]
            panel.scatter(*here, color=plots.RED, s=30, zorder=4)
            panel.set_xlabel("hyperparameter λ")
            panel.set_ylabel("weight w")
            panel.set_title(f"{name}, as height", fontsize=11)
            panel.view_init(elev=32, azim=-58)
        slope = -marked["best response"] * (1.0 - marked["best response"])
        reach = np.array([-1.1, 1.1])
        slope_text = f"slope: the hypergradient, {marked['hypergradient']:.3f}".replace("-", "−")
        axes[0, 1].plot(
            marked["hyperparameter"] + reach,
            marked["best response"] + slope * reach,
            marked["validation loss"] + marked["hypergradient"] * reach,
            color=plots.RED, linewidth=2.2, zorder=3, label=slope_text,
        )  # fmt: skip
        for panel in axes[0]:
            panel.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, fontsize=9)
    return [path]
