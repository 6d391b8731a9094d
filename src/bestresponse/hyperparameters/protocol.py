"""What a module of hyperparameters may provide besides its parameters.

Any `torch.nn.Module` with trainable parameters is a module of hyperparameters: no base class, nothing to register. A
module can provide more through methods. Each of them is a protocol here:

| protocol | method | who calls it |
|---|---|---|
| `Bounded` | ``project_()`` | `Tuner`, after each step of the hyperparameters |
| `Searchable` | ``ranges()`` | `search`, to draw values |
| `KnownCurvature` | ``curvature_diagonal(model)`` | ``rest`` of `GaussNewton` and the like, preconditioners |
| `KnownMixedTerm` | ``mixed_product(model, v)`` besides the former | ``rest``, for the mixed term |
| `Kinked` | ``rates_at_zero(model)`` | `Tuner` and `orthant_wise`, around each step of the weights |

`testing.check_hyperparameters(module, model)` checks those that a module provides, by differences.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Bounded(Protocol):
    """Hyperparameters with bounds."""

    def project_(self) -> None:
        """Restore the bounds of the parameters, in place."""
        ...


@runtime_checkable
class Searchable(Protocol):
    """Hyperparameters that declare their search ranges."""

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest value of each parameter, by its name in the module."""
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
        """The product v · ∂²Ω/∂w∂λ, by hyperparameter; ``v`` has tensors by weight and may lack some."""
        ...


@runtime_checkable
class Kinked(Protocol):
    """A term of the training loss with a kink where a weight is zero."""

    def rates_at_zero(self, model: nn.Module) -> dict[str, Tensor]:
        """The slope r ≥ 0 of the penalty next to w_i = 0, by weight: the penalty is r_i |w_i| there.

        The tensors broadcast against the weights; weights without a kink are left out.
        """
        ...


def knows_its_curvature(term: Any) -> bool:
    """Whether a term provides its curvature, for the value that it has.

    A subclass that overrides ``forward`` and inherits ``curvature_diagonal`` has the curvature of another value.
    """
    if not isinstance(term, KnownCurvature):
        return False
    for kind in type(term).__mro__:
        if "curvature_diagonal" in vars(kind):
            return True
        if "forward" in vars(kind) or "__call__" in vars(kind):
            return False
    return True


def mixed_term_of(term: Any) -> KnownMixedTerm | None:
    """The term itself if its own class knows its mixed term.

    A class that inherits ``mixed_product`` may have changed only the value or the curvature, and thereby the mixed
    term.
    """
    own = vars(type(term)).keys() >= {"forward", "curvature_diagonal", "mixed_product"}
    return term if own and isinstance(term, KnownMixedTerm) else None
