"""Checks of the methods that a module of hyperparameters provides, against derivatives of its value."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, EvaluationError
from ..hyperparameters import Bounded, Kinked, KnownCurvature, Readable, Searchable
from ..hyperparameters.protocol import mixed_products
from .comparison import places

_STEP = 1e-5


@runtime_checkable
class _MixedProduct(Protocol):
    """A term with a mixed product, which may lack the curvature that `KnownMixedTerm` has too."""

    def __call__(self, model: nn.Module) -> Tensor: ...
    def mixed_product(self, model: nn.Module, v: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


def check_hyperparameters(module: nn.Module, model: nn.Module, tolerance: float = 1e-6) -> None:
    """Check the methods that a module provides (see `hyperparameters.protocol`).

    ``project_`` does not change values within their bounds, and moves values far outside to a point that it does not
    change again. ``ranges`` names parameters, and lowest < highest. ``curvature_diagonal`` is the whole
    second derivative of the term, which has no mixed derivatives. ``mixed_product`` is the derivative of the term's
    gradient with respect to each hyperparameter, and comes with a ``curvature_diagonal``. ``rates_at_zero`` is the
    slope of the term next to a weight of zero. ``readable`` gives one finite value for each entry.

    Args:
        module: the module to check, in float64, with values within its bounds.
        model: the model to call its terms with, in float64 and with at most a few hundred weights, none of them zero.
            Derivatives with respect to frozen weights are not checked.
        tolerance: the largest relative error.

    Parameters and buffers of both modules are restored.

    Raises:
        AssertionError: a method is wrong; the message has the required and the actual result.
        ArgumentError: the module has a term of the training loss, and the model has no trainable weight.
    """
    parameters = dict(module.named_parameters())
    if isinstance(module, KnownCurvature | _MixedProduct | Kinked) and not _trainable(model):
        raise ArgumentError(
            f"check_hyperparameters needs a model with a trainable weight, to check {type(module).__name__}; "
            f"{type(model).__name__} has none. Set requires_grad on its weights."
        )
    with _restored(module, model):
        if isinstance(module, Searchable):
            _check_ranges(module, parameters)
        if isinstance(module, KnownCurvature):
            _check_curvature(module, model, tolerance)
        if isinstance(module, _MixedProduct):
            _check_mixed(module, model, tolerance)
        if isinstance(module, Kinked):
            _check_rates(module, model, tolerance)
        if isinstance(module, Readable):
            _check_readable(module, parameters)
        if isinstance(module, Bounded):
            _check_bounds(module, parameters)


@contextmanager
def _restored(*modules: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers at the end, also buffers that were replaced."""
    parts = [part for module in modules for part in module.modules()]
    buffers = [(part, name, b) for part in parts for name, b in part._buffers.items()]
    tensors = [p for module in modules for p in module.parameters()] + [
        b for *_, b in buffers if b is not None
    ]
    kept = [(x, x.detach().clone()) for x in tensors]
    try:
        yield
    finally:
        for part, name, buffer in buffers:
            part._buffers[name] = buffer
        with torch.no_grad():
            for x, value in kept:
                x.copy_(value)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def _check_ranges(module: Searchable, parameters: dict[str, nn.Parameter]) -> None:
    for name, (lowest, highest) in module.ranges().items():
        assert name in parameters, f"ranges() must name parameters of the module; got {name!r}"
        assert lowest < highest, f"ranges() needs lowest < highest; got {lowest!r}, {highest!r} for {name!r}"


@torch.no_grad()
def _check_readable(module: Readable, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if (plain := module.readable(name)) is not None:
            entries = parameter.detach().reshape(-1)
            values = plain[1](entries)
            right = values.shape == entries.shape and bool(values.isfinite().all())
            assert right, f"readable({name!r}) must give one finite value for each entry; got {values}"


@torch.no_grad()
def _check_bounds(module: Bounded, parameters: dict[str, nn.Parameter]) -> None:
    before = {n: p.clone() for n, p in parameters.items()}
    module.project_()
    moved = [n for n, p in parameters.items() if not torch.equal(p, before[n])]
    assert not moved, f"project_() must leave values within the bounds as they are; it moved {moved[:5]}"
    for shift in (-1e6, 1e6):
        for p in parameters.values():
            if p.requires_grad:
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
    weights = _trainable(model)
    diagonal = module.curvature_diagonal(model)
    unknown = diagonal.keys() - dict(model.named_parameters()).keys()
    assert not unknown, f"curvature_diagonal() must name weights of the model; got {sorted(unknown)[:5]}"
    tensors = list(weights.values())
    slopes = _gradient(_term(module, model), tensors)
    expected = {n: diagonal.get(n, torch.zeros_like(w)) for n, w in weights.items()}
    size = max(map(_largest, expected.values())) or 1.0
    for name, slope in zip(weights, slopes, strict=True):
        assert expected[name].shape == slope.shape, (
            f"curvature_diagonal()[{name!r}] must have the weight's shape"
        )
        for index, entry in enumerate(slope.reshape(-1)):
            for other, part in zip(weights, _gradient(entry, tensors), strict=True):
                wanted = torch.zeros_like(part).reshape(-1)
                if other == name:
                    wanted[index] = expected[name].detach().reshape(-1)[index]
                error = _largest(part.reshape(-1) - wanted) / size
                assert error <= tolerance, (
                    f"curvature_diagonal() must be the whole Hessian of the term, to {tolerance}; got an error of "
                    f"{error:.2g} in ∂²/∂{name}∂{other}"
                )


def _check_mixed(module: Any, model: nn.Module, tolerance: float) -> None:
    weights, parameters = _trainable(model), _trainable(module)
    generator = torch.Generator().manual_seed(0)
    v = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device) for n, w in weights.items()}
    try:
        got = mixed_products(module, dict(module.named_parameters(remove_duplicate=False)), model, v)
    except EvaluationError as wrong:
        raise AssertionError(str(wrong)) from wrong
    slopes = _gradient(_term(module, model), list(weights.values()))
    along = torch.stack([(s * v[n]).sum() for n, s in zip(weights, slopes, strict=True)]).sum()
    wanted = _gradient(along, list(parameters.values()))
    size = max(map(_largest, wanted), default=0.0) or 1.0
    for (name, p), x in zip(parameters.items(), wanted, strict=True):
        error = _largest(got.get(id(p), torch.zeros_like(p)) - x) / size
        assert error <= tolerance, (
            f"mixed_product() must be v · ∂²/∂w∂λ of the term, to {tolerance}; got an error of {error:.2g} for {name!r}"
        )
    assert isinstance(module, KnownCurvature), (
        f"mixed_product() must come with curvature_diagonal(), since the library uses it only then; "
        f"{type(module).__name__} has none. Add curvature_diagonal(), or leave mixed_product() out"
    )


@torch.no_grad()
def _check_rates(module: Kinked, model: nn.Module, tolerance: float) -> None:
    """Check that the slope to both sides of zero is ± the rate, apart from the smooth part."""
    term: Any = module
    weights = dict(model.named_parameters())
    for name, rate in module.rates_at_zero(model).items():
        assert name in weights, f"rates_at_zero() must name weights of the model; got {name!r}"
        w, rates = weights[name], rate.expand(weights[name].shape)
        for index in places(w):
            kept = float(w[index])
            values = []
            for value in (_STEP, -_STEP, 0.0):
                w[index] = value
                values.append(float(term(model)))
            w[index] = kept
            kink = (values[0] + values[1] - 2.0 * values[2]) / (2.0 * _STEP)
            error = abs(kink - float(rates[index])) / (float(rates[index]) or 1.0)
            assert error <= max(tolerance, 1e-4), (
                f"rates_at_zero()[{name!r}] must be the slope next to a weight of zero, {kink:.6g}; got "
                f"{float(rates[index]):.6g} for entry {index}"
            )


def _term(module: Any, model: nn.Module) -> Tensor:
    """The value of the term, a scalar with a graph."""
    value = module(model)
    assert isinstance(value, Tensor), (
        f"forward() must return the term as a tensor; got {type(value).__name__}"
    )
    assert value.numel() == 1, f"forward() must return the term as a scalar; got shape {list(value.shape)}"
    assert value.requires_grad, (
        "forward() must return a term that has a gradient; got a tensor without a graph. Leave out no_grad(), "
        "detach() and item()"
    )
    return value


def _gradient(value: Tensor, tensors: list[Any]) -> list[Tensor]:
    """∂value/∂tensors with a graph, zero where value does not depend on them."""
    if not (tensors and value.requires_grad):
        return [torch.zeros_like(x) for x in tensors]
    found = torch.autograd.grad(value, tensors, create_graph=True, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, found, strict=True)]


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
