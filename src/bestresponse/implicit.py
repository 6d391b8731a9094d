"""The hypergradient: Algorithm 2 of the paper."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import _graph, _tree
from ._foreign_errors import foreign_errors_told
from ._forms import paused
from ._reach import reaches, refuse_unreached, unreached_by_validation
from ._singular import singular_operation
from ._tree import Tree
from .batches import weighted
from .claims import SecondDerivatives
from .curvature import Hessian, linearise
from .errors import ArgumentError, ArgumentTypeError, DivergedError, EvaluationError
from .linearisation import Curvature, Linearisation, require_curvature
from .passes import Passes
from .problem import MethodState, Problem
from .result import Hypergradient, accumulate, refuse_not_finite, warn_of_failure
from .running_statistics import Reading
from .solvers import ConjugateGradient, Identity, Report, Solution, Solver, Status
from .verification import Claim, verified


class Method(ABC):
    """A way to compute the hypergradient. Methods are values; what they remember is the problem's.

    Attributes:
        twice: whether it differentiates the training loss twice; else the losses keep their fast backends, whose
            backward has no derivative.
    """

    @property
    def twice(self) -> bool:
        return True

    @abstractmethod
    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        """The hypergradient of ``passes.problem`` at its present weights and hyperparameters."""

    def claim(self) -> Claim | None:
        """What differences can show of it, when a problem is verified; None for nothing."""
        return None


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

    Nothing changes: weights, buffers, ``.grad``, training mode and random state are as before, also
    after an error.

    Args:
        problem: the two losses.
        train_batch: the batch for curvature and mixed term.
        val_batch: the batch for the validation loss.
        method: how to compute it: ``Implicit()``, ``Unrolled(steps, step_size)``, ``Direct()``.
        seed: None draws dropout masks and the like from the caller's random state, which is put back;
            an integer gives an independent draw.
        weight_optimizer: what trains the weights, for methods that start from its state (`Unrolled` with
            momentum or Adam, `SAMA`); it is read and not changed.

    Raises:
        ArgumentTypeError: ``method`` is not a method, or ``weight_optimizer`` not an optimiser.
        EvaluationError: a loss is not a finite scalar with a graph; or a hyperparameter reaches
            neither loss.
        SecondDerivativeError: the training loss has an operation without a second derivative.

    Reference: Lorraine, Vicol and Duvenaud (2019).
    """
    if not isinstance(weight_optimizer, Optimizer | None):
        raise ArgumentTypeError(f"weight_optimizer must be a torch optimiser; got {weight_optimizer!r}.")
    result = differentiate(problem, train_batch, val_batch, method, seed, weight_optimizer)
    refuse_not_finite(result)
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

    Then step any optimiser of theirs. Arguments, result and errors are those of `hypergradient`.
    """
    result = hypergradient(problem, train_batch, val_batch, method, seed, weight_optimizer)
    accumulate(problem, result)
    return result


def differentiate(
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    method: Method,
    seed: int | None,
    weight_optimizer: object,
) -> Hypergradient:
    """`hypergradient` without its warning, for callers with a policy of their own.

    A ``weight_optimizer`` that is no torch optimiser has no state to look at.
    """
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a Problem; got {type(problem).__name__}.")
    check_method(method)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ArgumentTypeError(f"seed must be an integer or None; got {seed!r}.")
    problem.check_intact()
    known = weight_optimizer if isinstance(weight_optimizer, Optimizer) else None
    with foreign_errors_told(), problem.watch.hypergradient(problem.live()):
        with problem.undisturbed(seed, known, method.twice) as passes:
            result = method.differentiate(passes, train_batch, val_batch)
            passes.conclude()
        return replace(result, verification=verified(problem, method.claim(), train_batch, val_batch, seed))


def attempt(
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    method: Method,
    seed: int | None,
    weight_optimizer: object,
) -> Hypergradient:
    """`differentiate`, with NaN in all parts where steps ahead of the weights diverged."""
    try:
        return differentiate(problem, train_batch, val_batch, method, seed, weight_optimizer)
    except DivergedError:
        nothing = {n: torch.full_like(p, torch.nan) for n, p in problem.hyperparameters.items()}
        return Hypergradient(nothing, nothing, nothing, torch.nan)


def check_method(method: object) -> None:
    """Raise for a solver, a class or anything else where a method belongs."""
    if isinstance(method, Method):
        return
    advice = "Use Implicit(), or Unrolled(steps, step_size)."
    if isinstance(method, Solver):
        advice = f"A solver goes inside a method: Implicit({method!r})."
    elif isinstance(method, Curvature):
        advice = f"A curvature goes inside a method: Implicit(curvature={method!r})."
    elif isinstance(method, type):
        advice = f"Make an object of it: {method.__name__}(...)."
    raise ArgumentTypeError(f"method must be a method; got {method!r}. {advice}")


@dataclass(frozen=True, eq=False)
class Implicit(Method):
    """The implicit function theorem: Algorithm 2 of the paper, with any solver and any curvature.

        v₁ = ∂L_V/∂w,   v₂ = A⁻¹ v₁,   dL_V/dλ = ∂L_V/∂λ − v₂ · ∂²L_T/∂w∂λ

    It is exact where w is a stationary point of the training loss and the solve is exact.

    Args:
        solver: how to invert; None is the method that we recommend, conjugate gradient of four steps a
            call, warm-started and damped by itself.
        curvature: which A.
        warm_start: whether a call starts from the last solution of the same method object; None means
            True exactly when no solver was given. The first solve of a warm-started conjugate
            gradient goes on after its own steps, up to 20, while the relative residual is above 0.1.
        estimate_error: whether to estimate the error that the solve leaves in the hypergradient
            (`Report.hypergradient_error`), at the price of one more mixed product.

    Raises:
        ArgumentTypeError: ``solver`` is not a solver, or ``curvature`` not a curvature.
    """

    solver: Solver | None = None
    curvature: Curvature = Hessian()
    warm_start: bool | None = None
    estimate_error: bool = True

    def __post_init__(self) -> None:
        if self.warm_start is None:
            object.__setattr__(self, "warm_start", self.solver is None)
        if not isinstance(self.warm_start, bool):
            raise ArgumentTypeError(
                f"Implicit.warm_start must be True, False or None; got {self.warm_start!r}."
            )
        if self.solver is None:
            object.__setattr__(self, "solver", ConjugateGradient(max_steps=4, damping=None))
        if not isinstance(self.solver, Solver):
            raise ArgumentTypeError(
                f"Implicit.solver must be a solver, such as Neumann(terms=20); got {self.solver!r}."
            )
        require_curvature("Implicit", self.curvature)
        if self.warm_start and not self.solver.takes_start:
            raise ArgumentError(
                f"{self.solver!r} estimates the solution from zero, and from a warm start would tend to "
                "that of its first batch; got warm_start=True. Use solvers.SOBA(fresh_batches=True)."
            )

    @property
    def twice(self) -> bool:
        return self.curvature.twice

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem, read = passes.problem, Reading(passes, train_batch)
        val_loss, val_gradient, direct = validation_gradient(passes, val_batch, read)
        system = linearise(self.curvature, passes, train_batch)
        refuse_unreached(problem, direct, system.reached)
        b = system.responding({n: val_gradient[n] for n in system.names})
        del val_gradient
        solution = self._solve(passes, train_batch, system, b)
        missing = self._missing(system, solution, b)
        stretch = damping_stretch(solution, b)
        indirect = {n: None if x is None else -x for n, x in system.mixed(solution.x).items()}
        result = combine(problem, val_loss, direct, indirect)
        size = result.norm
        singular = ""
        if self.twice and (solution.report.status is Status.NOT_FINITE or not math.isfinite(size)):
            singular = singular_operation(passes, train_batch, b)
        report = replace(
            solution.report,
            status=self._status(solution.report),
            hypergradient_error=missing / size if missing is not None and size > 0.0 else None,
            damping_effect=damping_effect(result, stretch),
            detail="; ".join(filter(None, (singular, solution.report.detail, system.detail, read.detail))),
        )
        if math.isfinite(size):
            problem.remember(self, MethodState(solution.x if self.warm_start else None, solution.memory))
        return replace(result, solve=report, norms=read.norms)

    def _status(self, report: Report) -> Status:
        """*Converged* is said of the system that was asked for, not of one that the solver had to damp to solve it."""
        assert self.solver is not None
        indefinite = report.curvature is not None and report.curvature[0] < 0.0
        if report.status is Status.CONVERGED and self.solver.chooses_damping and indefinite:
            return Status.NEGATIVE_CURVATURE
        return report.status

    def claim(self) -> Claim:
        return SecondDerivatives(self.curvature, product=not isinstance(self.solver, Identity))

    def _missing(self, system: Linearisation, solution: Solution, b: Tree) -> float | None:
        """An estimate of ‖A⁻¹r · ∂²L_T/∂w∂λ‖, what the residual r = b − A x leaves out of the hypergradient.

        A⁻¹ is taken as the factor ‖x‖ / ‖b‖ by which it stretched the right-hand side.
        """
        if not self.estimate_error or solution.residual is None:
            return None
        mixed = system.mixed(solution.residual, last=False)
        of_residual = _tree.norm({n: x for n, x in mixed.items() if x is not None})
        return of_residual * _tree.norm(solution.x) / _tree.norm(b)

    def _solve(self, passes: Passes, batch: Any, system: Linearisation, b: Tree) -> Solution:
        assert self.solver is not None
        problem = passes.problem
        state = problem.state(self)
        if self.warm_start:
            problem.meet(self)
        elif self.solver.needs_start:
            problem.warn_once(
                "cold steps",
                f"{type(self.solver).__name__} makes a few steps a call from the last solution, which needs "
                "warm_start=True; without it each call begins at zero.",
            )
        start = state.solution if state.solution is not None and state.solution.keys() == b.keys() else None
        start = None if start is None else system.responding(start)
        solver = self.solver.opening() if self.warm_start and start is None else self.solver
        diagonal = (
            problem.curvature_diagonal(system.names) if getattr(solver, "diagonal", False) is True else None
        )
        make_inverse = getattr(getattr(solver, "preconditioner", None), "inverse", None)
        inverse = None if make_inverse is None else make_inverse(passes, batch)
        # A run of steps goes on with the batch after the last one.
        fresh = getattr(solver, "fresh_batches", False)
        products = system.in_turn(state.memory.get("count", 0)) if fresh else system
        with paused() as resumed:
            solution = solver.solve(
                resumed(products), b, start=start, memory=state.memory, diagonal=diagonal, inverse=inverse
            )
        said = "; ".join(filter(None, (solution.report.detail, getattr(inverse, "detail", ""))))
        return replace(solution, report=replace(solution.report, detail=said))


def damping_stretch(solution: Solution, b: Tree) -> float | None:
    """How much longer the solution would be without its damping, less one; None without damping or an answer.

    x₀ − x = δ A⁻¹ x, where A⁻¹ is taken as the inverse of the curvature along x, xᵀA x / xᵀx. That is known at no
    product, from A x = b − r − δ x.
    """
    report, x = solution.report, solution.x
    if not report.damping or (report.curvature is not None and report.curvature[0] < 0.0):
        return None
    square = _tree.dot(x, x)
    along = _tree.dot(x, b) - report.damping * square
    along -= _tree.dot(x, solution.residual) if solution.residual is not None else 0.0
    return report.damping * square / along if along > 0.0 else None


def damping_effect(result: Hypergradient, stretch: float | None) -> float | None:
    """An estimate of ‖h − h₀‖ / ‖h₀‖, where h₀ = direct + (1 + stretch) · indirect is that without damping."""
    if stretch is None:
        return None
    undamped = _tree.norm(_tree.add(result.direct, result.indirect, 1.0 + stretch))
    return stretch * _tree.norm(result.indirect) / undamped if undamped > 0.0 else None


def validation_gradient(
    passes: Passes,
    batch: Any,
    read: Reading,
    weights: Tree | None = None,
    through_weights: bool = True,
) -> tuple[float, Tree, dict[str, Tensor | None]]:
    """L_V, ∂L_V/∂w (zero where it does not depend on w) and ∂L_V/∂λ (None where not on λ), statistics included.

    With ``through_weights`` it raises where L_V depends on no weight at all.
    """
    problem = passes.problem
    at = problem.weights if weights is None else weights
    inputs = [*at.values(), *problem.hyperparameters.values()]
    total: list[Tensor | None] = [None] * len(inputs)
    value, reached = 0.0, not through_weights
    # The graph of one batch at a time; its backward pass in the mode of the loss too.
    for number, (piece, weight) in enumerate(weighted(batch)):
        with passes.numbered(number), passes.validating():
            with read:
                loss = passes.val_loss(piece, weights)
            _graph.refuse_reentrant(loss)
            passes.rewind()
            gradients = [
                g.to_dense() if g is not None and g.layout != torch.strided else g
                for g in read.gradients(loss, inputs, weight)
            ]
        reached = reached or reaches(loss, gradients[: len(at)], at.values())
        total = [_graph.plus(sofar, g, weight) for sofar, g in zip(total, gradients, strict=True)]
        value += weight * float(loss.detach())
    if not reached:
        raise unreached_by_validation(problem)
    total = list(map(_graph.plus, total, read.followed(inputs, weights)))
    of_weights = {
        n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(at.items(), total, strict=False)
    }
    direct: dict[str, Tensor | None] = dict(zip(problem.hyperparameters, total[len(at) :], strict=True))
    if bad := _tree.not_finite(of_weights) + _tree.not_finite(direct):
        raise EvaluationError(
            f"the gradient of val_loss must be finite; got NaN or infinity for {bad[:5]}. "
            "Look for sqrt, log or division at zero in it."
        )
    return value, of_weights, direct


def combine(
    problem: Problem,
    val_loss: float,
    direct: Mapping[str, Tensor | None],
    indirect: Mapping[str, Tensor | None],
) -> Hypergradient:
    """Direct and indirect part with zeros for what is absent, and their sum."""
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
        direct_[name] = torch.zeros_like(parameter) if one is None else one
        indirect_[name] = torch.zeros_like(parameter) if other is None else other
        total[name] = direct_[name] + indirect_[name]
    return Hypergradient(total, direct_, indirect_, val_loss)
