"""What a curvature is: the training gradient, linearised at the present weights and hyperparameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from torch import Tensor

from .._tree import Tree
from ..errors import ArgumentError, ArgumentTypeError, EvaluationError
from ..problem import Passes, Problem
from .kinks import Kinks


class Linearisation(ABC):
    """The training gradient of one batch, linearised at the present weights and hyperparameters.

    Calling it is the product v ↦ A v, so a solver takes it as it is. Vectors are dicts with a tensor
    for each weight in `names`: weights that the training loss does not reach have no best response,
    and are left out.

    Attributes:
        names: the weights in the linear system.
        reached: the identities of the leaves that the training loss depends on.
        detail: what the solve's report should say of it.
        kinks: those of the training loss that weights stand on.
    """

    names: list[str]
    reached: set[int]
    detail: str = ""
    kinks: Kinks = Kinks()

    @abstractmethod
    def __call__(self, v: Tree) -> Tree:
        """A v."""

    @abstractmethod
    def mixed(self, v: Tree, last: bool = True) -> dict[str, Tensor | None]:
        """V · ∂²L_T/∂w∂λ by hyperparameter, None where λ does not reach the training gradient.

        With ``last`` it is the last call: what the linearisation held is freed.
        """

    def responding(self, v: Tree) -> Tree:
        """``v`` with zeros for the weights that a kink holds, which are in `names` and do not respond."""
        return v

    def outputs(self) -> list[Tensor]:
        """The outputs of a model that is linearised in them, computed anew at the present weights; else none."""
        return []

    def pushed(self, v: Tree) -> list[Tensor]:
        """J v = ∂outputs/∂w · v, for each of `outputs`."""
        return []

    def in_turn(self, first: int) -> Callable[[Tree], Tree]:
        """Products with the curvature of one batch at a time, each with the next of several, from a number on."""
        raise ArgumentError(
            "a solver with fresh_batches=True needs several training batches; got one. Pass Batches([...])."
        )


class Curvature(ABC):
    """Which matrix stands for the curvature of the training loss.

    Attributes:
        twice: whether it differentiates the training loss twice.
        exact: whether A is the Hessian of the training loss, and no approximation of it.
    """

    twice: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    @abstractmethod
    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        """Linearise the training gradient of ``batch`` at the present weights and hyperparameters."""


def require_curvature(owner: str, value: object) -> None:
    """Raise for a method's argument that is no curvature."""
    if not isinstance(value, Curvature):
        raise ArgumentTypeError(f"{owner}.curvature must be a curvature, such as Hessian(); got {value!r}.")


def warn_of_unreached(problem: Problem, names: Iterable[str]) -> None:
    """Name the weights that the training loss does not depend on, once; raise where it depends on none."""
    reached = set(names)
    refuse_no_weights(problem, reached)
    if missing := problem.weights.keys() - reached:
        problem.warn_once(
            "unreached weights",
            f"train_loss does not reach the weights {sorted(missing)[:10]}: they have no best response, and are "
            "left out.",
        )


def reached_weights(problem: Problem, reached: set[int]) -> list[str]:
    """The weights that the training loss depends on."""
    names = [n for n, w in problem.weights.items() if id(w) in reached]
    refuse_no_weights(problem, names)
    return names


def refuse_no_weights(problem: Problem, names: Collection[str]) -> None:
    """Raise where the training loss depends on none."""
    if not names:
        frozen = [n for n, w in problem.weights.items() if not w.requires_grad]
        why = f"; {frozen[:5]} no longer require a gradient" if frozen else ""
        raise EvaluationError(
            f"train_loss must depend on a weight of the model; it reaches none of {list(problem.weights)[:5]}"
            f"{why}. Compute it from the model that is passed in, without detach() or no_grad()."
        )
