"""The base class of methods, and the hypergradient computed by a method."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .. import _tree
from ..curvatures import Curvature
from ..errors import ArgumentTypeError, require_seed
from ..passes.foreign_errors import foreign_errors_told
from ..problem import Passes, Problem
from ..solvers import Solver
from ..verification.base import Claim, verified
from .accumulation import accumulate
from .hypergradient import Hypergradient, added, require_finite, warn_of_failure
from .savings import savings
from .sharding import refuse_sharded


class Method(ABC):
    """A way to compute the hypergradient. Methods are immutable values; the problem stores their state.

    Attributes:
        twice: whether it differentiates the training loss twice. If not, the losses keep their fast backends, whose
            backward pass has no derivative.
    """

    @property
    def twice(self) -> bool:
        return True

    @abstractmethod
    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        """The hypergradient of ``passes.problem`` at its present weights and hyperparameters."""

    @property
    def savings(self) -> str:
        """What needs less memory than this method, for the message when memory runs out."""
        return ""

    def needing_whole(self) -> object:
        """The part that needs whole weights on each rank; None if it runs on sharded ones too."""
        return self

    def parts_that_remember(self) -> Mapping[str, object]:
        """The parts of the method that have their own state on a problem, by name; `Tuner.save` stores these states."""
        return {}

    def claim(self) -> Claim | None:
        """The quantity that verification compares with differences; None if there is nothing to compare."""
        return None


class CurvatureMethod(Method):
    """A method with a curvature, which decides how often the training loss is differentiated, and has a state."""

    curvature: Curvature

    @property
    def twice(self) -> bool:
        return self.curvature.twice

    def parts_that_remember(self) -> Mapping[str, object]:
        return {"curvature": self.curvature}


def hypergradient(
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    method: Method,
    seed: int | None = None,
    weight_optimizer: Optimizer | None = None,
) -> Hypergradient:
    """The gradient of the validation loss with respect to every hyperparameter, through the weights.

        dL_V/dλ = ∂L_V/∂λ − (A⁻¹ ∂L_V/∂w) · ∂²L_T/∂w∂λ        (Algorithm 2 of the paper)

    The call changes nothing: weights, buffers, ``.grad``, training mode and random state are as before, even
    after an error.

    Args:
        problem: the two losses.
        train_batch: the batch for the curvature and the mixed term.
        val_batch: the batch for the validation loss.
        method: how to compute it: ``Implicit()``, ``Unrolled(steps, step_size)``, ``Direct()``.
        seed: None draws dropout masks and other random numbers from the caller's random state and restores that
            state; an integer gives an independent draw.
        weight_optimizer: the optimiser that trains the weights, for methods that start from its state (`Unrolled`
            with momentum or Adam, `SAMA`); it is read and not changed.

    Raises:
        ArgumentTypeError: ``method`` is not a method, or ``weight_optimizer`` not an optimiser.
        EvaluationError: a loss is not a finite scalar with a graph, or a hyperparameter reaches
            neither loss.
        SecondDerivativeError: the training loss has an operation without a second derivative.

    Reference: Lorraine, Vicol and Duvenaud (2019).
    """
    if not isinstance(weight_optimizer, Optimizer | None):
        raise ArgumentTypeError(f"weight_optimizer must be a torch optimiser; got {weight_optimizer!r}.")
    result = unchecked_hypergradient(problem, train_batch, val_batch, method, seed, weight_optimizer)
    require_finite(result)
    warn_of_failure(problem, method, result)
    return result


def backward(
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    method: Method,
    seed: int | None = None,
    weight_optimizer: Optimizer | None = None,
) -> Hypergradient:
    """Add the hypergradient into the ``.grad`` of the hyperparameters, as Tensor.backward does.

    Call the hyperparameters' optimiser afterwards. Arguments, result and errors are those of `hypergradient`. A warning
    comes if ``.grad`` already holds something else, such as ∂L_T/∂λ from a plain ``loss.backward()``.
    """
    result = hypergradient(problem, train_batch, val_batch, method, seed, weight_optimizer)
    accumulate(problem, result)
    return result


def unchecked_hypergradient(
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    method: Method,
    seed: int | None,
    weight_optimizer: object,
) -> Hypergradient:
    """`hypergradient` without its warning, for callers with their own policy.

    The state of a ``weight_optimizer`` is read only if it is a torch optimiser.
    """
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a Problem; got {type(problem).__name__}.")
    require_method(method)
    require_seed("seed", seed)
    problem.check_intact()
    refuse_sharded(problem, method.needing_whole(), train_batch, val_batch)
    known = weight_optimizer if isinstance(weight_optimizer, Optimizer) else None
    before = {part: problem.state(part).copy() for part in (method, *method.parts_that_remember().values())}
    try:
        if parts := problem.parts(method, train_batch, val_batch, seed):
            return added([unchecked_hypergradient(*p[:3], method, p[3], weight_optimizer) for p in parts])
        with foreign_errors_told(savings(method.savings, train_batch)), problem.edits.whole(problem.live()):
            with problem.undisturbed(seed, known, method.twice) as passes:
                result = method.differentiate(passes, train_batch, val_batch)
                passes.conclude()
            return replace(
                result, verification=verified(problem, method.claim(), train_batch, val_batch, seed)
            )
    except BaseException:
        for part, state in before.items():
            problem.remember(part, state)
        raise


def require_method(method: object) -> None:
    """Raise unless ``method`` is a method: for a solver, a class or anything else."""
    if isinstance(method, Method):
        return
    advice = "Use Implicit(), or Unrolled(steps, step_size)."
    if isinstance(method, Solver):
        advice = f"A solver goes inside a method: Implicit({method!r})."
    elif isinstance(method, Curvature):
        advice = f"A curvature goes inside a method: Implicit(curvature={method!r})."
    elif isinstance(method, type):
        advice = f"Create an instance: {method.__name__}(...)."
    if not isinstance(method, Solver | Curvature | type):
        advice = f"The order is (problem, train_batch, val_batch, method). {advice}"
    raise ArgumentTypeError(f"method must be a method; got {method!r:.60}. {advice}")


def combine(
    problem: Problem,
    val_loss: float,
    direct: Mapping[str, Tensor | None],
    indirect: Mapping[str, Tensor | None],
) -> Hypergradient:
    """Direct and indirect part, with zeros for absent entries, and their sum."""
    idle = [
        n
        for n, p in problem.hyperparameters.items()
        if n in indirect and indirect[n] is None and direct.get(n) is None and p.numel()
    ]
    if idle:
        problem.warn_once(
            ("idle", *idle),
            f"the hyperparameters {idle[:5]} reach train_loss, but not its gradient with respect to the weights: "
            "their hypergradient is zero. Something that does not move the weights cannot be tuned.",
        )
    direct_, indirect_, total = {}, {}, {}
    for name, parameter in problem.hyperparameters.items():
        one, other = direct.get(name), indirect.get(name)
        if problem.group.averages:  # a part of a buffer would keep the whole of it
            one, other = (None if x is None else x.clone() for x in (one, other))
        direct_[name] = _tree.zeros(parameter, other) if one is None else one
        indirect_[name] = _tree.zeros(parameter, one) if other is None else other
        total[name] = _tree.summed(direct_[name], indirect_[name])
    return Hypergradient(total, direct_, indirect_, val_loss)
