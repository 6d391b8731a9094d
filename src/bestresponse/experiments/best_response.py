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
        """Both surfaces over the plane with the best response, and the validation loss along it on a wall."""
        marked, curve = rows[0], sorted(rows[1:], key=lambda row: row["hyperparameter"])
        grid = np.meshgrid(np.linspace(*_LIMITS[0], 60), np.linspace(*_LIMITS[1], 60))
        places, weights = (torch.from_numpy(x) for x in grid)
        at = {key: np.array([row[key] for row in curve]) for key in rows[0]}
        look = {"projection": "3d", "computed_zorder": False}
        path = folder / self.figures[0]
        # Products of 3D axes sometimes report invalid numbers, which BLAS leaves in unused lanes.
        with np.errstate(all="ignore"), plots.panels(path, 1, 2, (10.0, 5.4), subplot_kw=look) as axes:
            for panel, (name, loss) in zip(axes[0], _LOSSES.items(), strict=True):
                height = loss(weights, places).numpy()
                panel.plot_surface(*grid, height, cmap="GnBu", alpha=0.5, linewidth=0, zorder=1)
                on_surface = at["hyperparameter"], at["best response"], at[name]
                panel.plot(*on_surface, color=plots.BLUE, linewidth=1.2, linestyle=":", zorder=3)
                self._draw_response(panel, at, marked, -0.8 * float(height.max()))
                panel.set(xlabel="hyperparameter λ", ylabel="weight w", xlim=_LIMITS[0], ylim=_LIMITS[1])
                panel.set_title(f"{name}, as height", fontsize=11, y=0.99)
                panel.set_xticks(range(-3, 2))
                panel.view_init(elev=28, azim=-58)
            self._draw_objective(axes[0, 1], at, marked)
            for panel in axes[0]:
                panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.03), fontsize=8)
                panel.set_zticks([tick for tick in panel.get_zticks() if tick >= 0])

    def _draw_response(self, panel: Any, at: dict[str, Any], marked: Row, floor: float) -> None:
        """The best response in the plane of λ and w, with its Jacobian as a tangent."""
        panel.set_zlim(bottom=floor)
        plane, reach = np.full(self.points, floor), np.array([-0.9, 0.9])
        label = "best response w*(λ), in the plane"
        panel.plot(
            at["hyperparameter"], at["best response"], plane, color=plots.BLUE, linewidth=2.2, label=label
        )
        tangent = marked["hyperparameter"] + reach, marked["best response"] + marked["Jacobian"] * reach
        text = f"its slope: the Jacobian, {marked['Jacobian']:.3f}".replace("-", "−")
        panel.plot(*tangent, [floor, floor], color="#6fb1d8", linewidth=3.2, zorder=4, label=text)
        panel.scatter(
            marked["hyperparameter"], marked["best response"], floor, color=plots.BLUE, s=25, zorder=5
        )

    def _draw_objective(self, panel: Any, at: dict[str, Any], marked: Row) -> None:
        """The validation loss along the best response, over the axis of λ, with the hypergradient as a tangent."""
        wall, reach = np.full(self.points, _LIMITS[1][1]), np.array([-1.1, 1.1])
        label = "$L_V$(w*(λ), λ), over the axis of λ"
        panel.plot(
            at["hyperparameter"], wall, at["validation loss"], color=plots.RED, linewidth=2.2, label=label
        )
        tangent = (
            marked["hyperparameter"] + reach,
            marked["validation loss"] + marked["hypergradient"] * reach,
        )
        text = f"its slope: the hypergradient, {marked['hypergradient']:.3f}".replace("-", "−")
        panel.plot(tangent[0], wall[:2], tangent[1], color="#e79a85", linewidth=3.2, zorder=4, label=text)
        here = marked["hyperparameter"], _LIMITS[1][1], marked["validation loss"]
        panel.scatter(*here, color=plots.RED, s=25, zorder=5)


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
        "Jacobian": float(h.indirect["value"]) / (best - 0.6),  # the indirect part is ∂L_V/∂w times it
        "derivative": (best - 0.6) * -best * (1.0 - best) + 0.02 * place,
    }


def _train(w: Any, place: Any) -> Tensor:
    loss: Tensor = 0.5 * (w - 1.0) ** 2 + 0.5 * torch.exp(place) * w**2
    return loss


def _val(w: Any, place: Any) -> Tensor:
    loss: Tensor = 0.5 * (w - 0.6) ** 2 + 0.01 * place**2
    return loss


_LOSSES = {"training loss": _train, "validation loss": _val}
