"""Both losses of a problem with one weight and one hyperparameter: the paper's figure 1."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bestresponse as br

from . import plots
from .experiment import Count, Experiment, Row, Tasks

_LIMITS = (-3.5, 1.0), (0.0, 1.2)
_LARGEST = "largest |hypergradient − derivative by hand|"


class BestResponse(Experiment):
    """Draw training and validation loss over one weight and one hyperparameter, with the best response on both.

    L_T = ½ (w − 1)² + ½ exp(λ) w², so that w*(λ) = 1 / (1 + exp(λ));  L_V = ½ (w − 0.6)² + 0.01 λ².
    At each point of the curve, the library's hypergradient is compared with the derivative of L_V(w*(λ), λ).
    """

    name = "best-response"
    labels = ()
    figures = ("best_response.png",)

    points: Count = 41  # Points of the curve.
    marked: float = -1.6  # The λ at which the hypergradient is drawn.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        places = [self.marked, *np.linspace(*_LIMITS[0], self.points)]
        return [lambda: (_point(float(place)) for place in places)]

    def table(self, rows: list[Row]) -> list[Row]:
        differences = [abs(row["hypergradient"] - row["derivative"]) for row in rows]
        return [{"points": len(rows), _LARGEST: max(differences)}]

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {"largest difference": table[0][_LARGEST]}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Both surfaces with the best response, and the hypergradient as the slope of the validation curve."""
        marked, curve = rows[0], sorted(rows[1:], key=lambda row: row["hyperparameter"])
        grid = np.meshgrid(np.linspace(*_LIMITS[0], 60), np.linspace(*_LIMITS[1], 60))
        places, weights = (torch.from_numpy(x) for x in grid)
        at = {key: np.array([row[key] for row in curve]) for key in rows[0]}
        surfaces = (
            ("training loss", _train, "best response w*(λ)"),
            ("validation loss", _val, "$L_V$(w*(λ), λ)"),
        )
        look = {"projection": "3d", "computed_zorder": False}
        path = folder / self.figures[0]
        # Products of 3D axes sometimes report invalid numbers, which BLAS leaves in unused lanes.
        with np.errstate(all="ignore"), plots.panels(path, 1, 2, (10.0, 4.6), subplot_kw=look) as axes:
            for panel, (name, loss, label) in zip(axes[0], surfaces, strict=True):
                height = loss(weights, places).numpy()
                panel.plot_surface(*grid, height, cmap="GnBu", alpha=0.6, linewidth=0, zorder=0)
                line = at["hyperparameter"], at["best response"], at[name]
                panel.plot(*line, color=plots.BLUE, linewidth=2.5, label=label, zorder=2)
                here = marked["hyperparameter"], marked["best response"], marked[name]
                panel.scatter(*here, color=plots.RED, s=30, zorder=4)
                panel.set(xlabel="hyperparameter λ", ylabel="weight w")
                panel.set_title(f"{name}, as height", fontsize=11)
                panel.view_init(elev=32, azim=-58)
            reach = np.array([-1.1, 1.1])
            tangent = (
                marked["hyperparameter"] + reach,
                marked["best response"] * (1.0 - (1.0 - marked["best response"]) * reach),
                marked["validation loss"] + marked["hypergradient"] * reach,
            )
            text = f"slope: the hypergradient, {marked['hypergradient']:.3f}".replace("-", "−")
            axes[0, 1].plot(*tangent, color=plots.RED, linewidth=2.2, zorder=3, label=text)
            for panel in axes[0]:
                panel.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, fontsize=9)


class _Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))


def _point(place: float) -> Row:
    """The best response at λ, and there the library's hypergradient and the derivative by hand."""
    best = float(1.0 / (1.0 + np.exp(place)))
    problem = br.Problem(
        _Scalar(best),
        _Scalar(place),
        lambda model, hyper, batch: _train(model.value, hyper.value),
        lambda model, hyper, batch: _val(model.value, hyper.value),
    )
    h = br.hypergradient(problem, None, None, br.Implicit(br.Exact()))
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
