"""Checks of the derivatives that autograd gives: against differences of the losses and of the gradient."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..curvature import FiniteDifference, Hessian
from ..errors import Error, SecondDerivativeError
from ..linearisation import Linearisation
from .findings import Bench, named

# A relative distance that no rounding explains, in float64 and below.
_WRONG = {torch.float64: 1e-4}
_WRONG_BELOW = 0.02
_TENSORS = 60


def examine(bench: Bench) -> None:
    """Compare gradients with differences of the losses, and one product and mixed term with those of the gradient."""
    for name, batch in (("train_loss", bench.train), ("val_loss", bench.val)):
        _gradient(bench, name, batch)
    _second(bench)


def _gradient(bench: Bench, name: str, batch: object) -> None:
    """The slope along one direction in each tensor, by autograd and by differences of the loss."""
    problem = bench.problem
    tensors: dict[str, Tensor] = {**problem.weights, **problem.hyperparameters}
    with problem.undisturbed(bench.seed) as passes:
        gradient = torch.autograd.grad(
            getattr(passes, name)(batch), list(tensors.values()), allow_unused=True
        )
    slopes = {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(tensors.items(), gradient, strict=True)
    }
    wrong = [n for n in list(tensors)[:_TENSORS] if _differs(bench, name, batch, tensors[n], slopes[n])]
    if wrong:
        bench.say(
            "error",
            "first derivatives",
            f"the gradient of {name} must be its slope; differences of the loss say otherwise for {named(wrong)}. Look "
            "there for detach(), no_grad(), edits through .data, or a straight-through estimator.",
        )
    else:
        bench.say("ok", "first derivatives", f"the gradient of {name} agrees with differences of the loss.")


def _differs(bench: Bench, name: str, batch: object, x: Tensor, g: Tensor) -> bool:
    """Whether the slope along one direction is another than that of differences, beyond their own error."""
    direction = _direction(x, g)
    size = (1e-4 if x.dtype == torch.float64 else 1e-2) * (float(x.detach().norm()) or 1.0)
    kept = x.detach().clone()

    def slope(step: float) -> tuple[float, float]:
        values = []
        for shift in (step, -step):
            try:
                with torch.no_grad():
                    x.copy_(kept + shift * direction)
                with bench.problem.undisturbed(bench.seed) as passes:
                    values.append(float(getattr(passes, name)(batch).detach()))
            finally:
                with torch.no_grad():
                    x.copy_(kept)
        rounding = 4.0 * torch.finfo(torch.float32 if x.dtype != torch.float64 else x.dtype).eps
        return (values[0] - values[1]) / (2.0 * step), rounding * max(map(abs, values)) / step

    try:
        (coarse, _), (fine, rounding) = slope(size), slope(size / 2.0)
    except Error:
        return False  # not finite a step away
    expected = float((g * direction).sum())
    uncertain = 5.0 * (abs(coarse - fine) + rounding) + _wrong(x) * max(abs(fine), abs(expected))
    return abs(expected - fine) > uncertain


def _wrong(x: Tensor) -> float:
    return _WRONG.get(x.dtype, _WRONG_BELOW)


def _direction(x: Tensor, g: Tensor) -> Tensor:
    """A unit vector that is half along the gradient, where there is one, and half random."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
    whole = random / random.norm() + (g / g.norm() if float(g.norm()) > 0.0 else 0.0)
    unit: Tensor = (whole / whole.norm()).detach()
    return unit


def _second(bench: Bench) -> None:
    """One product with the Hessian, and one mixed term, against differences of the training gradient."""
    problem = bench.problem
    try:
        with problem.undisturbed(bench.seed) as passes:
            system = Hessian().linearise(passes, bench.train)
            v = _random(system, problem.weights)
            product, mixed = system(v), system.mixed(v)
    except SecondDerivativeError as error:
        bench.say("error", "second derivatives", str(error))
        return
    except Error as error:
        bench.say("error", "second derivatives", str(error))
        return
    try:
        found = [_differences(bench, v, scale) for scale in (1.0, 0.5)]
    except Error as error:
        bench.say("note", "second derivatives", f"not compared with differences: {error}")
        return
    (coarse, coarse_mixed), (fine, fine_mixed) = found
    wrong = [n for n in product if _apart(product[n], coarse[n], fine[n], _tree.norm(fine))]
    if wrong:
        bench.say(
            "error",
            "second derivatives",
            "a product with the Hessian must be the difference of the training gradient; it is not for "
            f"{named(wrong)}. Look there for detach(), .data, buffers that gradients should flow through, or a custom "
            "backward that is not differentiable; or use Implicit(curvature=FiniteDifference()).",
        )
    full = {n: _or_zero(mixed[n], p) for n, p in problem.hyperparameters.items()}
    other = [
        {n: _or_zero(m.get(n), p) for n, p in problem.hyperparameters.items()}
        for m in (coarse_mixed, fine_mixed)
    ]
    wrong_mixed = [n for n in full if _apart(full[n], other[0][n], other[1][n], _tree.norm(other[1]))]
    if wrong_mixed:
        bench.say(
            "error",
            "second derivatives",
            "the mixed term must be the difference of the gradient with respect to hyperparameters; it is not for "
            f"{named(wrong_mixed)}. Look for detach() between them and the weights.",
        )
    idle = [n for n, x in full.items() if not bool(x.any())]
    if idle:
        bench.say(
            "warning",
            "hyperparameters",
            f"{named(idle)} do not move the training gradient: nothing of them comes through the weights.",
        )
    if not (wrong or wrong_mixed):
        text = "one product and one mixed term agree with differences of the training gradient."
        bench.say("ok", "second derivatives", text)


def _random(system: Linearisation, weights: Mapping[str, Tensor]) -> Tree:
    generator = torch.Generator().manual_seed(1)
    return {
        n: torch.randn(weights[n].shape, generator=generator).to(weights[n].device, weights[n].dtype)
        for n in system.names
    }


def _differences(bench: Bench, v: Tree, scale: float) -> tuple[Tree, Mapping[str, Tensor | None]]:
    """The product and the mixed term by differences, of the usual step times ``scale``."""
    precision = max(torch.finfo(x.dtype).eps for x in v.values())
    step = scale * precision ** (1 / 3)
    with bench.problem.undisturbed(bench.seed) as passes:
        system = FiniteDifference(step).linearise(passes, bench.train)
        return system(v), system.mixed(v)


def _apart(x: Tensor, coarse: Tensor, fine: Tensor, whole: float) -> bool:
    """Whether x is far from differences of two steps, which tell their own error; small parts of a whole are passed."""
    uncertain = 5.0 * float((coarse - fine).norm()) + _wrong(x) * (float(fine.norm()) + 0.1 * whole)
    return float((x - fine).norm()) > uncertain


def _or_zero(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x
