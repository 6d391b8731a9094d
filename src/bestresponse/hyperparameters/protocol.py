"""What a module of hyperparameters may provide besides its parameters.

Any `torch.nn.Module` with trainable parameters is a module of hyperparameters: no base class, nothing to register. A
module can provide more through methods. Each of them is a protocol here:

| protocol | method | who calls it |
|---|---|---|
| `Shrinking` | ``shrink_(factor)`` | `Tuner`, after each step of the hyperparameters |
| `Bounded` | ``project_()`` | `Tuner`, after that |
| `Searchable` | ``ranges()`` | `search`, to draw values |
| `KnownCurvature` | ``curvature_diagonal(model)`` | ``rest`` of `GaussNewton` and the like, preconditioners |
| `KnownMixedTerm` | ``mixed_product(model, v)`` besides the former | ``rest``, for the mixed term |
| `Constrained` | ``values()`` | `save`, for files that other programs read |
| `Kinked` | ``rates_at_zero(model)`` | `Tuner` and `orthant_wise`, around each step of the weights |
| `Readable` | ``readable(name)`` | `Tuner`, for the history |

`testing.check_hyperparameters(module, model)` checks those that a module provides, against derivatives of its value.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor, nn

from ..errors import EvaluationError


@runtime_checkable
class Bounded(Protocol):
    """Hyperparameters with bounds."""

    def project_(self) -> None:
        """Restore the bounds of the parameters, in place."""
        ...


@runtime_checkable
class Shrinking(Protocol):
    """Hyperparameters that are pulled towards a common value; see `Shrinkage`."""

    def shrink_(self, factor: float = 1.0) -> None:
        """Move the parameters a part of the way, in place; ``factor`` scales the strength."""
        ...


@runtime_checkable
class Searchable(Protocol):
    """Hyperparameters that declare their search ranges."""

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest value of each parameter, by its name in the module."""
        ...


@runtime_checkable
class Constrained(Protocol):
    """Hyperparameters that are stored in another form than the one in which they are used, as a decay by its log."""

    def values(self) -> Mapping[str, Tensor] | Tensor:
        """The values as they are used: rates, weights, decays."""
        ...


@runtime_checkable
class KnownCurvature(Protocol):
    """A term Ω(w, λ) of the training loss, without mixed derivatives ∂²Ω/∂w_i∂w_j, called as ``module(model)``."""

    def __call__(self, model: nn.Module) -> Tensor:
        """Ω as a scalar."""
        ...

    def curvature_diagonal(self, model: nn.Module) -> Mapping[str, Tensor]:
        """∂²Ω/∂w_i², by weight and of its shape; weights on which Ω does not depend are left out."""
        ...


@runtime_checkable
class KnownMixedTerm(KnownCurvature, Protocol):
    """A term Ω(w, λ) that also knows its mixed second derivative."""

    def mixed_product(self, model: nn.Module, v: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The product v · ∂²Ω/∂w∂λ, by hyperparameter; ``v`` has tensors by weight and may lack some.

        If a parameter has two names, the products under both names are added.
        """
        ...


@runtime_checkable
class Kinked(Protocol):
    """A term of the training loss with a kink where a weight is zero."""

    def rates_at_zero(self, model: nn.Module) -> dict[str, Tensor]:
        """The slope r ≥ 0 of the penalty next to w_i = 0, by weight: the penalty is r_i |w_i| there.

        The tensors broadcast against the weights; weights without a kink are left out.
        """
        ...


@runtime_checkable
class Readable(Protocol):
    """Hyperparameters whose plain values are functions of single entries, such as decays of their logarithms."""

    def readable(self, name: str) -> tuple[str, Callable[[Tensor], Tensor]] | None:
        """The name of the plain values of the parameter ``name``, and the function of entries that computes them.

        None where the parameter is best shown as it is.
        """
        ...


def knows_its_curvature(term: object) -> TypeGuard[KnownCurvature]:
    """Whether a term provides its curvature, for the value that it has.

    A subclass that overrides ``forward`` and inherits ``curvature_diagonal`` has the curvature of another value. An
    object that forwards ``curvature_diagonal`` to another one, as a wrapper does, is trusted.
    """
    return isinstance(term, KnownCurvature) and _follows(term, "curvature_diagonal", "forward")


def knows_its_mixed_term(term: object) -> TypeGuard[KnownMixedTerm]:
    """Whether the class of a term provides its mixed term, for the value and the curvature that it has."""
    return (
        isinstance(term, KnownMixedTerm)
        and _depth(term, "mixed_product") < len(type(term).__mro__)
        and _follows(term, "mixed_product", "forward")
        and _follows(term, "mixed_product", "curvature_diagonal")
    )


def diagonal_of(term: KnownCurvature, model: nn.Module) -> dict[str, Tensor]:
    """The curvature that a term provides, by weight.

    Raises:
        EvaluationError: a name is not that of a weight.
    """
    diagonal = dict(term.curvature_diagonal(model))
    if unknown := sorted(diagonal.keys() - dict(model.named_parameters()).keys()):
        raise EvaluationError(
            f"curvature_diagonal() of {type(term).__name__} must name weights of the model; got {unknown[:5]}. Return "
            "tensors by the names of model.named_parameters()."
        )
    return diagonal


def mixed_products(
    term: KnownMixedTerm, parameters: Mapping[str, Tensor], model: nn.Module, v: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """The mixed products that a term provides, by the identity of its parameters.

    Args:
        term: the term.
        parameters: all parameters of the term, by all their names.
        model: the model.
        v: tensors by weight.

    Raises:
        EvaluationError: a name is not that of a parameter, or a product has another shape.
    """
    total: dict[int, Tensor] = {}
    for name, product in term.mixed_product(model, v).items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != product.shape:
            shapes = {n: list(p.shape) for n, p in parameters.items()}
            raise EvaluationError(
                f"mixed_product() of {type(term).__name__} must have the names and shapes of its parameters, as in "
                f"{dict(list(shapes.items())[:5])}; got {name!r} with shape {list(product.shape)}. Return tensors by "
                "the names of named_parameters()."
            )
        key = id(parameter)
        total[key] = total[key] + product if key in total else product
    return total


def _follows(term: object, method: str, other: str) -> bool:
    """Whether no subclass overrides ``other`` and inherits ``method``, which depends on it."""
    depth = _depth(term, method)
    return depth == len(type(term).__mro__) or depth <= _depth(term, other)


def _depth(term: object, method: str) -> int:
    """How far up the base classes a method is defined; their number if no class defines it."""
    bases = type(term).__mro__
    return next((depth for depth, kind in enumerate(bases) if method in vars(kind)), len(bases))
