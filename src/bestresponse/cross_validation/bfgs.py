"""Steps of few hyperparameters by a quasi-Newton method that uses gradients alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _tree
from ..errors import ArgumentTypeError, require, require_number

# Growth of a step in the last one's direction while there is no positive curvature, and what is left after a turn.
_GROW, _SHRINK = 2.0, 0.5


class BFGS(Optimizer):
    """BFGS steps from gradients alone, for few parameters with exact gradients, such as the logarithms of penalties.

        θ ← θ − H g,  H ≈ (∂²L_V/∂θ²)⁻¹ from the last steps and changes of the gradient

    It evaluates no loss between steps, so it is a ``hyper_optimizer`` of `Tuner`. Where the gradient shows no positive
    curvature, for example far from the minimum, a step follows the gradient with a length that doubles. It does not
    suit noisy gradients.

    Args:
        params: the parameters.
        first: the largest change of a parameter in the first step.
        longest: the largest change of a parameter in any step.
    """

    def __init__(self, params: Iterable[Any], first: float = 1.0, longest: float = 2.5) -> None:
        require_number("BFGS.first", first)
        require_number("BFGS.longest", longest)
        require(0 < first <= longest, "BFGS.first", f"positive and at most longest={longest}", first)
        super().__init__(params, {"first": first, "longest": longest})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`; the state keeps its double precision, whatever that of the parameters."""
        super().load_state_dict(state_dict)
        for own, saved in zip(self.state.values(), state_dict["state"].values(), strict=True):
            own.update((name, x.to(own[name].device)) for name, x in saved.items() if isinstance(x, Tensor))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step along ``.grad``."""
        if closure is not None:
            raise ArgumentTypeError(
                "BFGS.step must be called without a closure, after the gradients are set."
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        settings, state = self.param_groups[0], self.state[parameters[0]]
        here = _flat(parameters)
        gradient = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        inverse: Tensor | None = None
        length = settings["first"]
        if state:
            moved, change = here - state["here"], gradient - state["gradient"]
            inverse = _updated(state["inverse"], moved, change)
            onward = bool(gradient @ state["gradient"] > 0)
            length = min(settings["longest"], state["length"] * (_GROW if onward else _SHRINK))
        step = -gradient if inverse is None else -inverse @ gradient
        largest = float(step.abs().max())
        if inverse is not None:
            length = min(settings["longest"], largest)
        if largest > 0:
            step = step * (length / largest)
        state.update(here=here, gradient=gradient, inverse=inverse, length=length)
        for p, x in zip(parameters, torch.split(step, [p.numel() for p in parameters]), strict=True):
            p.add_(x.view_as(p).to(p))


def _updated(inverse: Tensor | None, moved: Tensor, change: Tensor) -> Tensor | None:
    """The BFGS update of H; None if the last step met no positive curvature."""
    along = moved @ change
    if not bool(along > 1e-10 * moved.norm() * change.norm()):
        return None
    identity = torch.eye(len(moved), dtype=moved.dtype, device=moved.device)
    if inverse is None:
        inverse = identity * (along / (change @ change))
    left = identity - torch.outer(moved, change) / along
    return left @ inverse @ left.T + torch.outer(moved, moved) / along


def _flat(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device
    return torch.cat([_tree.dense(x.detach()).reshape(-1).double().to(device) for x in tensors])
