"""The empirical Fisher matrix: the mean outer product of the gradients of single examples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentTypeError, EvaluationError, require_parameters
from ..problem import Passes
from .base import Curvature, Linearisation
from .gauss_newton import GaussNewton
from .split_loss import Rest, check_rest


@dataclass(frozen=True, eq=False)
class EmpiricalFisher(Curvature):
    """A = (1/N) Σ_n g_n g_nᵀ + R, with g_n = ∂loss_n/∂w and R the exact Hessian of ``rest``.

    For train_loss = mean(example_loss(model, hyper, batch)) + rest(model, hyper, batch). It is positive
    semi-definite wherever rest is convex. It is near the Hessian only if the model is right in the mean, and
    vanishes if the model fits every example. `GaussNewton` is the better choice; this curvature serves comparisons
    with the literature.

    It is `GaussNewton` with the N losses as outputs, and I/N instead of their output Hessian.

    Args:
        example_loss: (model, hyper, batch) -> the N losses of the examples, [N].
        rest: what train_loss adds to their mean, as for `GaussNewton`.

    Raises:
        EvaluationError: example_loss returns something else, or mean + rest differs from train_loss.
        SecondDerivativeError: an operation of the training loss has no second derivative.

    Reference: Larsen, Hansen, Svarer and Ohlsson (1996); its limits, Kunstner, Balles and Hennig (2019).
    """

    example_loss: Callable[[Any, Any, Any], Tensor]
    rest: Rest | nn.Module | None = None
    _outer_product: GaussNewton = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.example_loss):
            raise ArgumentTypeError(
                "EmpiricalFisher.example_loss must be a function (model, hyper, batch) -> [N]; got "
                f"{self.example_loss!r}."
            )
        require_parameters("EmpiricalFisher.example_loss", self.example_loss, "model, hyper, batch")
        check_rest("EmpiricalFisher", self.rest)
        outer_product = GaussNewton(_Checked(self.example_loss), _Mean(), self.rest)
        object.__setattr__(self, "_outer_product", outer_product)

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return self._outer_product.linearise(passes, batch)


@dataclass(frozen=True)
class _Checked:
    """The losses of the examples; raises if they are not per-example losses."""

    example_loss: Callable[[Any, Any, Any], Tensor]

    def __call__(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        losses = self.example_loss(model, hyper, batch)
        if not isinstance(losses, Tensor) or losses.ndim != 1 or not losses.requires_grad:
            got = type(losses).__name__
            if isinstance(losses, Tensor):
                got = f"shape {list(losses.shape)}" if losses.requires_grad else "a tensor without a graph"
            raise EvaluationError(
                f"EmpiricalFisher.example_loss must return a loss for each example, [N], with a graph; got {got}. "
                'Compute it with reduction="none", without detach().'
            )
        return losses


class _Mean:
    """The mean of the losses, with I/N where its Hessian would be."""

    def __call__(self, losses: Tensor, batch: Any) -> Tensor:
        return losses.mean()

    def output_hessian(self, losses: Tensor, batch: Any) -> Callable[[Tensor], Tensor]:
        return lambda u: u / len(losses)
