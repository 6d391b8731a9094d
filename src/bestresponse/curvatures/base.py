"""The base class of curvatures: the training gradient, linearised at the present weights and hyperparameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from .._tree import Tree
from ..distributed import Group
from ..errors import ArgumentError, ArgumentTypeError, EvaluationError
from ..problem import Passes, Problem
from ..solvers import Report
from .kinks import Kinks


class Linearisation(ABC):
    """The training gradient of one batch, linearised at the present weights and hyperparameters.

    A call is the product v ↦ A v, so a solver can use the object directly. Vectors are dicts with a tensor
    for each weight in `names`. Weights that the training loss does not reach have no best response
    and are left out.

    Attributes:
        names: the weights in the linear system.
        reached: the identities of the leaves that the training loss depends on.
        detail: a note for the solve's report.
        kinks: the kinks of the training loss where weights lie.
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
        """The product v · ∂²L_T/∂w∂λ by hyperparameter; None if λ does not reach the training gradient.

        ``last`` marks the last call, which frees the memory of the linearisation.
        """

    def with_mixed(self, v: Tree) -> tuple[Tree, dict[str, Tensor | None] | None] | None:
        """A v and `mixed` of v, if a product gives both at hardly more than its own cost.

        Else None, or A v and None.
        """
        return None

    def gradient(self) -> Tree | None:
        """∂L_T/∂w, once and before any product, if the linearisation has it at hand; else None."""
        return None

    def covered(self, v: Mapping[str, Tensor]) -> Tree:
        """The tensors of ``v`` for the weights in `names`."""
        return {n: v[n] for n in self.names}

    def responding(self, v: Tree) -> Tree:
        """``v`` with zeros for the weights that a kink holds; they are in `names` but do not respond."""
        return v

    def average(self, group: Group, batch: Any) -> None:  # noqa: B027
        """Take the mean over the ranks of a group of what products are not linear in, such as Kronecker factors."""

    def outputs(self) -> list[Tensor]:
        """The outputs in which the model is linearised, computed again at the present weights; else none."""
        return []

    def pushed(self, v: Tree) -> list[Tensor]:
        """J v = ∂outputs/∂w · v, for each of `outputs`."""
        return []

    def bends(self, v: Tree) -> Tree:
        """The derivatives of `slopes` along v and J v that products use; empty if they use no others than J."""
        return {}

    def slopes(self, t: float) -> Tree:
        """The derivatives of the loss in its outputs and past them, at the outputs z + t J v with v of `bends`."""
        return {}

    def in_turn(self, first: int) -> Callable[[Tree], Tree]:
        """Products with one batch at a time: each uses the next of several batches, starting at a number."""
        raise ArgumentError(
            "a solver with fresh_batches=True needs several training batches; got one. Pass Batches([...])."
        )


class Curvature(ABC):
    """The matrix that represents the curvature of the training loss.

    Attributes:
        twice: whether it differentiates the training loss twice.
        exact: whether A is the Hessian of the training loss, not an approximation of it.
    """

    twice: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    @abstractmethod
    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        """Linearise the training gradient of ``batch`` at the present weights and hyperparameters."""

    def now(self, problem: Problem) -> "Curvature":
        """The curvature in use on this problem; another one if the curvature chooses."""
        return self

    def at_minimum(self) -> "Curvature":
        """The curvature where the weights are at a minimum of the training loss."""
        return self

    def doubts(self, problem: Problem, report: Report) -> bool:
        """Whether a solve with this report makes the curvature look for another one, by `gives_way`."""
        return False

    def gives_way(self, passes: Passes, batch: Any) -> bool:
        """Whether the curvature chooses another one, so that the solve must be made again."""
        return False


def by_place(of_outputs: Iterable[Tensor], of_weights: Mapping[str, Tensor]) -> Tree:
    """Derivatives of a loss in its outputs and past them, under the names of `Linearisation.slopes`."""
    return {
        **{f"slope of output {i}": x.detach() for i, x in enumerate(of_outputs)},
        **{f"{n} past the outputs": x.detach() for n, x in of_weights.items()},
    }


def require_curvature(owner: str, value: object) -> None:
    """Raise if a method's argument is not a curvature."""
    if not isinstance(value, Curvature):
        raise ArgumentTypeError(f"{owner}.curvature must be a curvature, such as Hessian(); got {value!r}.")


def warn_of_unreached(problem: Problem, names: Iterable[str]) -> None:
    """Warn once of the weights that the training loss does not depend on; raise if it depends on none."""
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
    """Raise if the training loss depends on no weight."""
    if not names:
        frozen = [n for n, w in problem.weights.items() if not w.requires_grad]
        why = f"; {frozen[:5]} no longer require a gradient" if frozen else ""
        raise EvaluationError(
            f"train_loss must depend on a weight of the model; it reaches none of {list(problem.weights)[:5]}"
            f"{why}. Compute it from the model that is passed in, without detach() or no_grad()."
        )
