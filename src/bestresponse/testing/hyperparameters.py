"""Checks of the methods that a module of hyperparameters provides, against derivatives of its value."""

from typing import Any

import torch
from torch import Tensor, nn

from ..hyperparameters import Bounded, Kinked, KnownCurvature, KnownMixedTerm, Searchable

_STEP = 1e-5


def check_hyperparameters(module: nn.Module, model: nn.Module, tolerance: float = 1e-6) -> None:
    """Check the methods that a module provides (see `hyperparameters.protocol`).

    ``project_`` does not change values within their bounds, and moves values far outside to a point that it does not
    change again. ``ranges`` names parameters, and lowest < highest. ``curvature_diagonal`` is the whole
    second derivative of the term, which has no mixed derivatives. ``mixed_product`` is the derivative of the term's
    gradient with respect to each hyperparameter. ``rates_at_zero`` is the slope of the term next to a weight of zero.

    Args:
        module: the module to check, in float64, with values within its bounds. Its values are restored.
        model: the model to call its terms with, in float64 and with at most a few hundred weights, none of them zero;
            they are restored.
        tolerance: the largest relative error.

    Raises:
        AssertionError: a method is wrong; the message has the required and the actual result.
    """
    parameters = dict(module.named_parameters())
    kept = [(p, p.detach().clone()) for p in (*parameters.values(), *model.parameters())]
    try:
        if isinstance(module, Searchable):
            _check_ranges(module, parameters)
        if isinstance(module, KnownCurvature):
            _check_curvature(module, model, tolerance)
        if isinstance(module, KnownMixedTerm):
            _check_mixed(module, model, parameters, tolerance)
        if isinstance(module, Kinked):
            _check_rates(module, model, tolerance)
        if isinstance(module, Bounded):
            _check_bounds(module, parameters)
    finally:
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)


def _check_ranges(module: Searchable, parameters: dict[str, nn.Parameter]) -> None:
    for name, (lowest, highest) in module.ranges().items():
        assert name in parameters, f"ranges() must name parameters of the module; got {name!r}"
        assert lowest < highest, f"ranges() needs lowest < highest; got {lowest!r}, {highest!r} for {name!r}"


@torch.no_grad()
def _check_bounds(module: Bounded, parameters: dict[str, nn.Parameter]) -> None:
    before = {n: p.clone() for n, p in parameters.items()}
    module.project_()
    moved = [n for n, p in parameters.items() if not torch.equal(p, before[n])]
    assert not moved, f"project_() must leave values within the bounds as they are; it moved {moved[:5]}"
    for shift in (-1e6, 1e6):
        for p in parameters.values():
            p.add_(shift)
        module.project_()
        once = {n: p.clone() for n, p in parameters.items()}
        module.project_()
        again = [n for n, p in parameters.items() if not torch.equal(p, once[n])]
        assert not again, f"project_() must change nothing the second time; it moved {again[:5]}"
        for n, p in parameters.items():
            p.copy_(before[n])


def _check_curvature(module: KnownCurvature, model: nn.Module, tolerance: float) -> None:
    """Rows of the dense Hessian, by double backward."""
    weights = dict(model.named_parameters())
    diagonal = module.curvature_diagonal(model)
    unknown = diagonal.keys() - weights.keys()
    assert not unknown, f"curvature_diagonal() must name weights of the model; got {sorted(unknown)[:5]}"
    tensors = list(weights.values())
    slopes = _gradient(module(model), tensors)
    expected = {n: diagonal.get(n, torch.zeros_like(w)) for n, w in weights.items()}
    size = max((float(d.detach().abs().max()) for d in expected.values()), default=0.0) or 1.0
    for name, slope in zip(weights, slopes, strict=True):
        assert expected[name].shape == slope.shape, (
            f"curvature_diagonal()[{name!r}] must have the weight's shape"
        )
        for index, entry in enumerate(slope.reshape(-1)):
            row = _gradient(entry, tensors) if entry.requires_grad else map(torch.zeros_like, tensors)
            for other, part in zip(weights, row, strict=True):
                wanted = torch.zeros_like(part).reshape(-1)
                if other == name:
                    wanted[index] = expected[name].detach().reshape(-1)[index]
                error = float((part.detach().reshape(-1) - wanted).abs().max()) / size
                assert error <= tolerance, (
                    f"curvature_diagonal() must be the whole Hessian of the term, to {tolerance}; got an error of "
                    f"{error:.2g} in ∂²/∂{name}∂{other}"
                )


def _check_mixed(
    module: KnownMixedTerm, model: nn.Module, parameters: dict[str, nn.Parameter], tolerance: float
) -> None:
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    v = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device) for n, w in weights.items()}
    got = module.mixed_product(model, v)
    slopes = _gradient(module(model), list(weights.values()))
    along = sum((s * v[n]).sum() for n, s in zip(weights, slopes, strict=True))
    assert isinstance(along, Tensor)
    wanted = _gradient(along, list(parameters.values()))
    size = max((float(x.detach().abs().max()) for x in wanted), default=0.0) or 1.0
    for (name, p), x in zip(parameters.items(), wanted, strict=True):
        found = got.get(name, torch.zeros_like(p))
        assert found.shape == p.shape, f"mixed_product()[{name!r}] must have the parameter's shape"
        error = float((found - x).detach().abs().max()) / size
        assert error <= tolerance, (
            f"mixed_product() must be v · ∂²/∂w∂λ of the term, to {tolerance}; got an error of {error:.2g} for {name!r}"
        )


@torch.no_grad()
def _check_rates(module: Kinked, model: nn.Module, tolerance: float) -> None:
    """Check that the slope to both sides of zero is ± the rate, apart from the smooth part."""
    term: Any = module
    weights = dict(model.named_parameters())
    for name, rate in module.rates_at_zero(model).items():
        assert name in weights, f"rates_at_zero() must name weights of the model; got {name!r}"
        flat = weights[name].view(-1)
        rates = rate.expand(weights[name].shape).reshape(-1)
        for index in range(len(flat)):
            kept = float(flat[index])
            values = []
            for value in (_STEP, -_STEP, 0.0):
                flat[index] = value
                values.append(float(term(model)))
            flat[index] = kept
            kink = (values[0] + values[1] - 2.0 * values[2]) / (2.0 * _STEP)
            error = abs(kink - float(rates[index])) / (float(rates[index]) or 1.0)
            assert error <= max(tolerance, 1e-4), (
                f"rates_at_zero()[{name!r}] must be the slope next to a weight of zero, {kink:.6g}; got "
                f"{float(rates[index]):.6g} for entry {index}"
            )


def _gradient(value: Tensor, tensors: list[Any]) -> list[Tensor]:
    found = torch.autograd.grad(value, tensors, create_graph=True, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, found, strict=True)]
