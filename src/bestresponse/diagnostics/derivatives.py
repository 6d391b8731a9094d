"""Checks of the derivatives that autograd gives: against differences of the losses and of the gradient.

Kinks (ReLU, max pooling) make differences wrong by themselves, most of all where a network stands on one: zero biases,
zero-initialised scales. So a disagreement counts where it is found at several places near the weights.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import _tree
from ..curvatures import Hessian
from ..curvatures.finite_difference import Difference
from ..errors import Error, named
from ..problem import Problem
from ..verification.probe import masked, or_zero, still
from .findings import Bench

# A relative distance that no rounding explains, in float64 and below.
_WRONG, _WRONG_BELOW = 1e-4, 0.02
_TENSORS = 40
_PLACES = 4
_JITTER = 1e-3


def examine(bench: Bench, places: int = _PLACES) -> None:
    """Compare gradients with differences of the losses, and one product and mixed term with those of the gradient."""
    for name, batch in (("train_loss", bench.train), ("val_loss", bench.val)):
        _gradient(bench, name, batch, places)
    if not bench.failed("first derivatives"):
        _second(bench, places)


# --- of the losses ------------------------------------------------------------------------------------


def _gradient(bench: Bench, name: str, batch: object, places: int) -> None:
    """The slope along one direction in each tensor, by autograd and by differences of the loss."""
    problem = bench.problem
    tensors: dict[str, Tensor] = {**problem.hyperparameters, **problem.weights}
    checked = _sample(problem)
    wrong = list(checked)
    for place in range(places):
        with _near(problem, place), problem.undisturbed(bench.seed) as passes:
            loss = getattr(passes, name)(batch)
            found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
            slopes = dict(zip(tensors, found, strict=True))
            if bad := _tree.not_finite(slopes):
                if not place:
                    _tell_not_finite(bench, name, bad)
                    return
                continue
            value = float(loss.detach())
            del loss
            run = (name, batch, value)
            wrong = [n for n in wrong if _differs(bench, run, n, tensors[n], or_zero(slopes[n], tensors[n]))]
        if not wrong:
            break
    if wrong:
        bench.say(
            "error",
            "first derivatives",
            f"the gradient of {name} must be its slope; differences of the loss say otherwise for {named(wrong)}. Look "
            "there for detach(), no_grad(), edits through .data, or a straight-through estimator.",
        )
        return
    left = len(tensors) - len(checked)
    text = f"the gradient of {name} agrees with differences of the loss"
    bench.say("ok", "first derivatives", text + (f" ({left} tensors were left out)." if left else "."))


def _sample(problem: Problem) -> list[str]:
    """All hyperparameters, and weights from the first to the last layer, so many in all."""
    hyper, weights = list(problem.hyperparameters)[:_TENSORS], list(problem.weights)
    room = max(1, _TENSORS - len(hyper))
    step = max(1.0, len(weights) / room)
    return hyper + [weights[int(i * step)] for i in range(min(room, len(weights)))]


def _tell_not_finite(bench: Bench, name: str, bad: Iterable[str]) -> None:
    bench.say(
        "error",
        "first derivatives",
        f"the gradient of {name} must be finite; got NaN or infinity for {named(bad)}. Look for sqrt, log, a norm or a "
        "division at zero.",
    )


@contextmanager
def _near(problem: Problem, place: int) -> Iterator[None]:
    """The weights themselves at the first place; moved a little, off what kinks they stand on, at all others."""
    if not place:
        yield
        return
    kept = _tree.copy(problem.weights)
    generator = torch.Generator().manual_seed(100 + place)
    padding = still(problem.model, problem.weights)
    try:
        with torch.no_grad():
            for name, w in problem.weights.items():
                size = _JITTER * (float(w.abs().mean()) or 1.0)
                noise = torch.randn(w.shape, generator=generator).to(w.device, w.dtype)
                w.add_(masked(noise, padding.get(name)), alpha=size)
        yield
    finally:
        _tree.write_(problem.weights, kept)


def _differs(bench: Bench, run: tuple[str, object, float], key: str, x: Tensor, g: Tensor) -> bool:
    """Whether the slope along one direction is another than that of differences, beyond their own error.

    ``run``: the name of the loss, its batch, and its value here.
    """
    name, batch, value = run
    direction = _direction(x, g, still(bench.problem.model, bench.problem.weights).get(key))
    double = x.dtype == torch.float64
    size = (1e-4 if double else 1e-2) * (float(x.detach().norm()) or 1.0)
    kept = x.detach().clone()

    def at(step: float) -> float:
        try:
            with torch.no_grad():
                x.copy_(kept + step * direction)
            with bench.problem.undisturbed(bench.seed) as passes:
                return float(getattr(passes, name)(batch).detach())
        finally:
            with torch.no_grad():
                x.copy_(kept)

    expected = float((g * direction).sum())
    rounding = 4.0 * abs(value) * torch.finfo(x.dtype if double else torch.float32).eps

    def agrees(slope: float, step: float, spread: float) -> bool:
        uncertain = 5.0 * (spread + rounding / step) + _wrong(x) * max(abs(slope), abs(expected))
        return abs(expected - slope) <= uncertain

    def slope(step: float) -> float:
        return (at(step) - at(-step)) / (2.0 * step)

    try:
        fine = slope(size / 2.0)
        if agrees(fine, size / 2.0, 0.0):
            return False
        # Now it matters how exact the differences are: their spread, and what half precision makes of a tiny step.
        coarse, tiny = slope(size), 1e-3 * size
        rounding += abs(at(tiny) - 2.0 * value + at(-tiny))
        if agrees(fine, size / 2.0, abs(coarse - fine)):
            return False
        return not agrees(slope(size / 32.0), size / 32.0, 0.0)
    except Error:
        return False  # not finite a step away


def _wrong(x: Tensor) -> float:
    return _WRONG if x.dtype == torch.float64 else _WRONG_BELOW


def _direction(x: Tensor, g: Tensor, padding: int | None) -> Tensor:
    """A unit vector that is half along the gradient, where there is one, and half random."""
    generator = torch.Generator().manual_seed(0)
    random = masked(torch.randn(x.shape, generator=generator).to(x.device, x.dtype), padding)
    random = random / (float(random.norm()) or 1.0)
    whole = random + (g / g.norm() if float(g.norm()) > 0.0 else 0.0)
    unit: Tensor = (whole / (float(whole.norm()) or 1.0)).detach()
    return unit


# --- of the training gradient ----------------------------------------------------------------------------


def _second(bench: Bench, places: int) -> None:
    """One product with the Hessian, and one mixed term, against differences of the training gradient."""
    problem = bench.problem
    wrong, wrong_mixed, idle = (
        list(problem.weights),
        list(problem.hyperparameters),
        list(problem.hyperparameters),
    )
    try:
        for place in range(places):
            with _near(problem, place):
                products, mixed = _compared(bench, place)
            wrong = [n for n in wrong if n in products and _apart(*products[n])]
            wrong_mixed = [n for n in wrong_mixed if _apart(*mixed[n])]
            idle = [n for n in idle if not bool(mixed[n][0].any())]
            if not (wrong or wrong_mixed):
                break
    except Error as error:
        bench.say("error", "second derivatives", str(error))
        return
    if wrong:
        bench.say(
            "error",
            "second derivatives",
            "a product with the Hessian must be the difference of the training gradient; it is not for "
            f"{named(wrong)}. Look there for detach(), .data, buffers that gradients should flow through, or a custom "
            "backward that is not differentiable; or use Implicit(curvature=FiniteDifference()).",
        )
    if wrong_mixed:
        bench.say(
            "error",
            "second derivatives",
            "the mixed term must be the difference of the gradient with respect to hyperparameters; it is not for "
            f"{named(wrong_mixed)}. Look for detach() between them and the weights.",
        )
    if idle:
        bench.say(
            "warning",
            "hyperparameters",
            f"{named(idle)} do not move the training gradient: nothing of them comes through the weights.",
        )
    if not (wrong or wrong_mixed):
        text = "one product and one mixed term agree with differences of the training gradient."
        bench.say("ok", "second derivatives", text)


Compared = dict[str, tuple[Tensor, Tensor, Tensor, float]]


def _compared(bench: Bench, place: int) -> tuple[Compared, Compared]:
    """By name: what autograd says, the differences of two steps, and the size of the whole."""
    problem = bench.problem
    hyper = problem.hyperparameters
    padding = still(problem.model, problem.weights)
    generator = torch.Generator().manual_seed(1 + place)
    with problem.undisturbed(bench.seed) as passes:
        system = Hessian().linearise(passes, bench.train)
        v = {}
        for n in system.names:
            w = problem.weights[n]
            v[n] = masked(torch.randn(w.shape, generator=generator).to(w.device, w.dtype), padding.get(n))
        product, mixed = system(v), system.mixed(v)
    found = []
    for scale in (1.0, 0.5):
        with problem.undisturbed(bench.seed, twice=False) as passes:
            other = Difference(passes, bench.train, None)
            other.step *= scale
            found.append((other(v), other.mixed(v)))
    (coarse, coarse_mixed), (fine, fine_mixed) = found
    size = _tree.norm(fine)
    of_hyper = [
        {n: or_zero(m.get(n), p) for n, p in hyper.items()} for m in (mixed, coarse_mixed, fine_mixed)
    ]
    size_mixed = _tree.norm(of_hyper[2])
    return (
        {n: (product[n], coarse[n], fine[n], size) for n in product},
        {n: (of_hyper[0][n], of_hyper[1][n], of_hyper[2][n], size_mixed) for n in hyper},
    )


def _apart(x: Tensor, coarse: Tensor, fine: Tensor, whole: float) -> bool:
    """Whether x is far from differences of two steps, which tell their own error; small parts of a whole are passed."""
    uncertain = 5.0 * float((coarse - fine).norm()) + _wrong(x) * (float(fine.norm()) + 0.1 * whole)
    return float((x - fine).norm()) > uncertain
