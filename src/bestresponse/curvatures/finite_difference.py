"""Products with the curvature, and the mixed term, as differences of two training gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError, EvaluationError, NotFiniteError, named, require, require_number
from ..passes import graph
from ..passes.arithmetic import arithmetic
from ..passes.resolution import APART, Circumstances, refuse_half_precision, relative_distance, sizes
from ..passes.substitution import refuse_max_norm
from ..problem import Passes, Problem
from . import kinks
from .base import Curvature, Linearisation, reached_weights

# The factors of the first step to try, in turn, until two results are close; and the largest step to try.
_FACTORS = (1.0, 1 / 4, 4.0, 1 / 16, 16.0)
_LARGEST = 0.5
Derivatives = dict[str, Tensor | None]


@dataclass(frozen=True, eq=False)
class FiniteDifference(Curvature):
    """A v ≈ (g(w + εv) − g(w − εv)) / 2ε, and the mixed term likewise: no second derivative is needed.

    For models whose operations have no second derivative (fused attention, custom kernels). Each product costs two
    training gradients. The weights are perturbed in place and restored from a copy; both sides use the
    same random state and buffers.

    ε is chosen so that no tensor of weights changes by more than ``step`` of its size, as root mean squares over its
    entries: max over tensors of ε ‖v‖ / ‖w‖ = step. A tensor smaller than the geometric mean of all, such as a fresh
    bias, counts as that large.

    Half the step verifies the first product and the first mixed term, at two training gradients each. If the two
    differ, at most four other steps are tried, and the best is kept: ``problem.state(curvature)`` shows it. This
    is repeated when a tensor has doubled or halved, and for each new object: make the curvature once. Products along
    the solution are also compared once; a warning appears if two steps differ by more than 10 %.

    In float64 products are right to 1e-8 to 1e-10, in float32 to about 1e-3 on smooth networks. In bfloat16 (autocast,
    frozen layers) verified products are right to 1 to 13 %; others are refused. *On networks with kinks (ReLU, max
    pooling) a float32 difference crosses kinks and can be wrong by more than the product itself*: a warning appears;
    use `Hessian` or float64 instead.

    Args:
        step: None takes half the cube root of the precision in which the training loss computes, which balances
            rounding and truncation, or the step that verification finds. A number between 0 and 1 is used as it is,
            and also verified.

    Raises:
        ArgumentError: the weights have half precision, which rounds the perturbation away; or the step is below the
            precision of the loss.
        EvaluationError: the loss computes in half precision or TensorFloat-32, and two steps differ by more than 10 %.
    """

    step: float | None = None

    twice = False

    def __post_init__(self) -> None:
        if self.step is not None:
            require_number("FiniteDifference.step", self.step)
            require(0.0 < self.step < 1.0, "FiniteDifference.step", "between 0 and 1, or None", self.step)

    def linearise(self, passes: Passes, batch: Any) -> Linearisation:
        return Difference(passes, batch, self.step, passes.problem.state(self).memory)


class Difference(Linearisation):
    """The training gradient, linearised by differences.

    Args:
        step: the relative step; None chooses it.
        memory: the results of earlier verifications, extended by new ones; None verifies nothing.

    Attributes:
        step: the initial relative step.
        arithmetic: the precision in which the loss computes.
    """

    def __init__(
        self, passes: Passes, batch: Any, step: float | None, memory: dict[str, Any] | None = None
    ) -> None:
        self._passes, self._batch, self._memory, self._fixed = passes, batch, memory, step is not None
        refuse_max_norm(passes.problem.model, "FiniteDifference")
        loss = passes.train_loss(batch)
        self.reached = graph.leaves(loss)
        self.names = reached_weights(passes.problem, self.reached)
        self._weights = {n: passes.problem.weights[n] for n in self.names}
        of_hyper = {n: p for n, p in passes.problem.hyperparameters.items() if id(p) in self.reached}
        self._inputs: dict[str, dict[str, Any]] = {"products": self._weights, "mixed": of_hyper}
        refuse_half_precision("FiniteDifference", self._weights)
        self.kinks = kinks.of_loss(passes.problem, loss)
        self._kinks = _kinks(loss)
        self.arithmetic = arithmetic(loss)
        self.step = step if step is not None else 0.5 * math.cbrt(self.arithmetic.eps)
        if self.step <= self.arithmetic.eps:
            raise ArgumentError(
                f"FiniteDifference.step must be above {self.arithmetic.eps:.1g}, the precision of train_loss, which "
                f"computes in {self.arithmetic.name}; got {self.step}. Leave it out: it is then chosen."
            )
        self._warned = _warn_of_kinks(passes.problem, self._kinks, self._weights)
        self._here = Circumstances(self.arithmetic, sizes(self._weights))
        self._say()
        self._loss: Tensor | None = loss

    def gradient(self) -> Tree | None:
        if self._loss is None:
            return None
        found = torch.autograd.grad(self._loss, list(self._weights.values()))
        self._loss = None
        return dict(zip(self._weights, found, strict=True))

    def __call__(self, v: Tree) -> Tree:
        difference = self._verified("products", v)
        return {n: torch.zeros_like(v[n]) if x is None else x for n, x in difference.items()}

    def mixed(self, v: Tree, last: bool = True) -> Derivatives:
        # A call that is not the last estimates an error, along a direction that may be rounding.
        difference = self._verified("mixed", v, only_known=not last)
        return dict.fromkeys(self._passes.problem.hyperparameters) | difference

    def _verified(self, kind: str, v: Tree, only_known: bool = False) -> Derivatives:
        """The difference with the step of this kind, which is verified first if necessary."""
        self._loss = None  # and its graph
        known, products = self._known(kind), self._known("products")
        begin = (known or products or {"step": self.step})["step"]
        size = self._relative(v)
        if size == 0.0 or not self._inputs[kind]:
            return {n: torch.zeros_like(x) for n, x in self._inputs[kind].items()}
        if known is not None or only_known or self._memory is None:
            return self._difference(begin / size, v, kind)[kind]
        # The mixed term uses the solution as its direction. Products matter most there, so they are verified again.
        kinds = ("products", "mixed") if kind == "mixed" and products else (kind,)
        step, apart, found = self._search(begin, size, v, kinds)
        self._judge(kind, apart)
        self._memory[kind] = self._here.data(step=step, apart=apart)
        self._say()
        return found

    def _known(self, kind: str) -> dict[str, Any] | None:
        """The verified steps, unless the weights or the arithmetic have changed."""
        known: dict[str, Any] | None = (self._memory or {}).get(kind)
        return known if self._here.same(known) else None

    def _search(
        self, begin: float, size: float, v: Tree, kinds: tuple[str, ...]
    ) -> tuple[float, float, Derivatives]:
        """The best of several steps for the last of the kinds, its distance from half the step, and its difference.

        The first step (the only one if the caller gave it) is also verified for the other kinds.
        """
        close = min(APART, math.cbrt(self.arithmetic.eps))
        others, best, apart = kinds[:-1], begin, math.inf
        found: Derivatives = {}
        for factor in _FACTORS if not self._fixed else _FACTORS[:1]:
            step = begin * factor
            if factor > 1.0 and step > _LARGEST:
                continue
            distances, differences = self._apart(step / size, v, kinds)
            for other in others:
                self._judge(other, distances[other], later=True)
            others, kinds = (), kinds[-1:]
            if distances[kinds[0]] < apart or not found:
                best, apart, found = step, distances[kinds[0]], differences.get(kinds[0], {})
            if apart <= close:
                break
        # If no step gives finite losses, there is no difference, and this raises.
        return best, apart, found or self._difference(best / size, v, *kinds)[kinds[0]]

    def _apart(
        self, step: float, v: Tree, kinds: tuple[str, ...]
    ) -> tuple[dict[str, float], dict[str, Derivatives]]:
        """The relative distance between the differences of this step and of half of it, and the former."""
        try:
            whole, half = (self._difference(x, v, *kinds) for x in (step, step / 2.0))
        except NotFiniteError:
            return dict.fromkeys(kinds, math.inf), {}
        return {kind: relative_distance(whole[kind], half[kind]) for kind in kinds}, whole

    def _judge(self, kind: str, apart: float, later: bool = False) -> None:
        """Raise or warn if two steps disagree; only warn for products along the solution if others were good."""
        if apart <= APART:
            return
        what = "a mixed term" if kind == "mixed" else "products along the solution" if later else "products"
        said = (
            f"FiniteDifference needs a train_loss that resolves small changes of the weights, and whose gradient is "
            f"smooth over its step; it computes in {self.arithmetic.name}"
            f"{f', has kinks ({named(self._kinks)})' if self._kinks else ''}, and two steps give {what} that differ by "
            f"{apart:.0%}. "
        )
        if self.arithmetic.low:
            said += (
                "Compute train_loss in float32 (without autocast, and frozen layers in float32), or use Hessian(), "
                f"whose products are good in {self.arithmetic.name}."
            )
            if not later:
                raise EvaluationError(said)
        else:
            said += "Look for kinks and rounding in train_loss; use Hessian(), or float64."
        if self.arithmetic.low or not self._warned:
            self._passes.problem.warn_once("steps apart", said)

    def _say(self) -> None:
        """The note for the report: how good differences in low precision are."""
        known = [x["apart"] for kind in ("products", "mixed") if (x := self._known(kind))]
        if known and self.arithmetic.low:
            self.detail = (
                f"differences in {self.arithmetic.name}, two steps of which are {max(known):.1%} apart"
            )

    def _relative(self, v: Tree) -> float:
        """The largest root mean square of a tensor of ``v`` in units of its weights' size; zero for zeros."""
        norm = _tree.norm(v)
        if norm == 0.0:
            return 0.0
        extreme = not 1e-15 < norm < 1e15  # squares would underflow or overflow
        found = _tree.root_mean_squares(_tree.scale(v, 1.0 / norm) if extreme else v)
        return max(x / self._here.sizes[n] for n, x in found.items()) * (norm if extreme else 1.0)

    def _difference(self, step: float, v: Tree, *kinds: str) -> dict[str, Derivatives]:
        """By kind: (∂L_T/∂inputs at w + εv less that at w − εv) / 2ε."""
        inputs = [x for kind in kinds for x in self._inputs[kind].values()]
        ahead, behind = (self._gradient_at(x, v, inputs) for x in (step, -step))
        found = iter(
            None if a is None or b is None else (a - b) / (2.0 * step)
            for a, b in zip(ahead, behind, strict=True)
        )
        return {kind: {n: next(found) for n in self._inputs[kind]} for kind in kinds}

    def _gradient_at(self, step: float, v: Tree, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        with _tree.put_back(self._weights):
            with torch.no_grad():
                for name, w in self._weights.items():
                    w.add_(v[name], alpha=step)
            loss = self._passes.train_loss(self._batch)
            return torch.autograd.grad(loss, inputs, allow_unused=True)


def _kinks(loss: Tensor) -> list[str]:
    return sorted({n.name() for n in graph.nodes([loss]) if n.name().startswith(graph.KINKED)})


def _warn_of_kinks(problem: Problem, kinks: Sequence[str], weights: Mapping[str, Tensor]) -> bool:
    if not kinks or all(w.dtype == torch.float64 for w in weights.values()):
        return False
    problem.warn_once(
        "kinks",
        f"FiniteDifference needs a smooth training loss in float32; got {kinks}, whose kinks a "
        "difference crosses, so that products can be wrong by more than their size. Use Hessian, or float64.",
    )
    return True
