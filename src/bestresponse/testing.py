"""Checks that every solver, curvature and method must pass: for our tests, and for classes of your own.

Each raises AssertionError with what was required and what was got, and returns nothing. They compare with the dense
answer.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _tree
from ._tree import Tree
from .curvatures import Curvature
from .methods import Method, hypergradient
from .problem import Problem
from .solvers import Solution, Solver, Status
from .solvers.direct import dense


@dataclass(frozen=True)
class LinearSystem:
    """A dense symmetric A and a right-hand side, over two tensors of different shapes.

    Attributes:
        name: what is special about it.
        matrix: A, [n, n].
        b: the right-hand side, [n].
        definite: whether A is positive definite.
    """

    name: str
    matrix: Tensor
    b: Tensor
    definite: bool

    @property
    def tree(self) -> Tree:
        """The right-hand side as a dict of tensors."""
        return self.unflatten(self.b)

    @property
    def eps(self) -> float:
        """The relative precision of its dtype."""
        return torch.finfo(self.b.dtype).eps

    def unflatten(self, vector: Tensor) -> Tree:
        """A vector as a dict of tensors."""
        vector = vector.to(self.b.dtype)
        return {"first": vector[:4].reshape(2, 2).clone(), "second": vector[4:].clone()}

    def product(self, v: Tree) -> Tree:
        """A v."""
        return self.unflatten(self.matrix @ _tree.flatten(v))

    def residual(self, x: Tree, damping: float = 0.0) -> float:
        """‖b − (A + δI) x‖ / ‖b‖, computed in float64."""
        flat, b = _tree.flatten(x).double(), self.b.double()
        return float((b - self.matrix.double() @ flat - damping * flat).norm() / b.norm())


def linear_systems(seed: int = 0) -> Iterator[LinearSystem]:
    """Definite, indefinite and singular systems, at two scales and in both precisions.

    Their eigenvalues are fixed; ``seed`` draws the directions of the eigenvectors and the right-hand side.
    """
    n = 9
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    b = torch.randn(n, generator=generator, dtype=torch.float64)

    def symmetric(*values: float) -> Tensor:
        matrix: Tensor = basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T
        return (matrix + matrix.T) / 2

    spread = symmetric(0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 1.7, 1.9, 2.0)
    singular = symmetric(0, 0, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8, 2.0)
    yield LinearSystem("definite", spread, b, True)
    yield LinearSystem("definite, large", 300.0 * spread, b, True)
    yield LinearSystem("definite, small", 1e-3 * spread, 1e3 * b, True)
    yield LinearSystem("a multiple of the identity", 2.0 * torch.eye(n, dtype=torch.float64), b, True)
    yield LinearSystem("indefinite", symmetric(-1.0, -0.5, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8, 2.0), b, False)
    yield LinearSystem("singular", singular, b, False)
    yield LinearSystem("singular, consistent", singular, singular @ b, False)
    yield LinearSystem("negative definite", -spread, b, False)
    yield LinearSystem("zero", torch.zeros(n, n, dtype=torch.float64), b, False)
    yield LinearSystem("definite, float32", spread.float(), b.float(), True)
    yield LinearSystem("singular, float32", singular.float(), b.float(), False)
    yield LinearSystem("singular, consistent, float32", singular.float(), (singular @ b).float(), False)


def check_solver(solver: Solver, tolerance: float = 1e-6, seed: int = 0) -> None:
    """Check a solver on `linear_systems`.

    On definite systems the answer must be the dense one to ``tolerance`` (in float32 to its precision). On all of
    them: products are counted; the residual that is reported is the true one, to rounding; *converged* is said of a
    computed residual only; an answer is finite or the status says why not; right-hand sides of any size give
    answers of that size; and a warm start from the solution stays there.

    Args:
        solver: one that is meant to converge on nine unknowns with a condition number of four.
        tolerance: the largest relative error.
        seed: of the systems.
    """
    for system in linear_systems(seed):
        solution = _counted_solve(solver, system)
        report = solution.report
        damping = report.damping or 0.0
        _require(not _tree.not_finite(solution.x), system, "a finite answer", solution.x)
        true = system.residual(solution.x, damping)
        if report.residual is not None:
            _require(true <= 2.0 * report.residual + 100 * system.eps, system, f"residual {true}", report)
        if report.status.failed:
            _require(true <= 1.0 + 100 * system.eps, system, "a best iterate no worse than zero", true)
        if report.status is Status.CONVERGED:
            _require(report.residual is not None, system, "`converged` with a residual", report)
            _require(true <= 1e-5, system, "a residual that deserves `converged`", true)
        if system.definite:
            matrix = system.matrix.double() + damping * torch.eye(len(system.b), dtype=torch.float64)
            expected = torch.linalg.solve(matrix, system.b.double())
            error = _relative_error(_tree.flatten(solution.x).double(), expected)
            bound = max(tolerance, 100 * system.eps)
            _require(error <= bound, system, f"an error below {bound}", error)
            _check_scaling(solver, system)
            _check_warm_start(solver, system, solution)
    zero = solver.solve(system.product, _tree.zeros_like(system.tree))
    _require(_tree.norm(zero.x) == 0.0, system, "zero for a right-hand side of zero", zero.x)


def _counted_solve(solver: Solver, system: LinearSystem, **arguments: Any) -> Solution:
    calls = 0

    def product(v: Tree) -> Tree:
        nonlocal calls
        calls += 1
        return system.product(v)

    b = system.tree
    solution = solver.solve(product, b, **arguments)
    _require(solution.report.products == calls, system, f"{calls} products", solution.report)
    _require(torch.equal(_tree.flatten(b), system.b), system, "an untouched right-hand side", b)
    return solution


def _check_scaling(solver: Solver, system: LinearSystem) -> None:
    plain = _tree.flatten(solver.solve(system.product, system.tree).x)
    for factor in (1e-200, 1e200) if system.b.dtype == torch.float64 else (2.0**-100, 2.0**100):
        scaled = solver.solve(system.product, system.unflatten(factor * system.b))
        error = _relative_error(_tree.flatten(scaled.x) / factor, plain)
        bound = 1e-12 if system.b.dtype == torch.float64 else 1e-4
        _require(error <= bound, system, f"{factor} times the answer for {factor} times b", error)


def _check_warm_start(solver: Solver, system: LinearSystem, solution: Solution) -> None:
    x = solution.x
    again = _counted_solve(solver, system, start=x, memory=solution.memory)
    before = system.residual(x, again.report.damping or 0.0)
    after = system.residual(again.x, again.report.damping or 0.0)
    _require(
        after <= before + 1e3 * system.eps, system, "a warm start from the solution to stay there", after
    )
    bad = system.unflatten(-1e9 * system.b)
    dropped = _counted_solve(solver, system, start=bad, memory=solution.memory)
    _require(not dropped.report.warm, system, "a bad start dropped", dropped.report)


def check_curvature(
    curvature: Curvature,
    problem: Problem,
    batch: Any,
    matrix: Tensor | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Check a curvature's products and mixed term on one batch of a small float64 problem.

    The products must make up ``matrix``, be symmetric, and be the same twice. The mixed term must be
    the central difference of the training gradient along each hyperparameter. Nothing may be left behind.

    Args:
        curvature: what to check.
        problem: with at most a few hundred weights and hyperparameters, in float64.
        batch: a training batch.
        matrix: the dense A, [n, n] in the order of the weights; None takes central differences of the
            training gradient, which is the Hessian.
        tolerance: the largest relative error.
    """
    with _no_trace(problem), problem.undisturbed() as passes:
        system = curvature.linearise(passes, batch)
        like = {n: problem.weights[n].detach() for n in system.names}
        measured = dense(system, like)
        again = dense(system, like)
        v = _tree.unflatten(torch.linspace(-1, 1, len(measured), dtype=torch.float64), like)
        mixed = system.mixed(v)
    if matrix is None:
        matrix = differences(problem, batch, problem.weights)
    largest = float(matrix.abs().max()) or 1.0
    for what, other, bound in (
        ("the dense matrix", matrix, tolerance),
        ("its own transpose", measured.T, tolerance),
        ("itself on the second call", again, 1e-13),
    ):
        error = float((measured - other).abs().max()) / largest
        assert error <= bound, f"{curvature!r} must equal {what} to {bound}; got an error of {error:.2g}."
    _check_mixed(curvature, problem, batch, like, v, mixed, tolerance)


def _check_mixed(
    curvature: Curvature, problem: Problem, batch: Any, like: Tree, v: Tree, mixed: Any, tolerance: float
) -> None:
    inputs = problem.hyperparameters
    rows = torch.cat([torch.full((w.numel(),), n in like) for n, w in problem.weights.items()])
    expected = differences(problem, batch, inputs)[rows].T @ _tree.flatten(v)
    filled = {n: torch.zeros_like(p) if mixed[n] is None else mixed[n] for n, p in inputs.items()}
    error = _relative_error(_tree.flatten(filled), expected)
    assert error <= tolerance, (
        f"the mixed term of {curvature!r} must equal differences of the training gradient to {tolerance}; "
        f"got an error of {error:.2g}."
    )


def differences(problem: Problem, batch: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """∂²L_T/∂w∂inputs by central differences of fourth order, [weights, inputs].

    ``inputs`` are live parameters, such as ``problem.hyperparameters``, whose values are moved and put back.
    """
    weights = list(problem.weights.values())
    columns = []
    step = 1e-3
    for parameter in inputs.values():
        flat = parameter.detach().view(-1)
        for index in range(flat.numel()):
            column = torch.zeros(_tree.size(problem.weights), dtype=torch.float64)
            for shift, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                with problem.undisturbed() as passes:
                    kept = flat[index].clone()
                    flat[index] += shift * step
                    gradient = torch.autograd.grad(passes.train_loss(batch), weights, allow_unused=True)
                    flat[index] = kept
                filled = [
                    torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradient, strict=True)
                ]
                column += factor * torch.cat([g.reshape(-1) for g in filled]) / (12 * step)
            columns.append(column)
    return torch.stack(columns, dim=1)


def check_method(
    method: Method,
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    expected: Mapping[str, Tensor] | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Check a method on one problem.

    Its hypergradient has the names and shapes of the hyperparameters, is the sum of its two parts, is
    the same for a second object of the same settings, and equals ``expected``. Nothing may be left behind.

    Args:
        method: what to check.
        problem: the problem, in float64.
        train_batch: the training batch.
        val_batch: the validation batch.
        expected: the hypergradient by hyperparameter, from a closed form or a re-solved problem.
        tolerance: the largest relative error.
    """
    problem.forget(method)
    with _no_trace(problem):
        result = hypergradient(problem, train_batch, val_batch, method, seed=1)
        problem.forget(method)
        again = hypergradient(problem, train_batch, val_batch, method, seed=1)
    assert result.total.keys() == problem.hyperparameters.keys(), f"{method!r} must name every hyperparameter"
    for name, parameter in problem.hyperparameters.items():
        total = result.total[name]
        assert total.shape == parameter.shape, f"{method!r}: the shape of {name} must be {parameter.shape}"
        assert torch.equal(total, result.direct[name] + result.indirect[name]), f"{method!r}: total ≠ sum"
        assert torch.equal(total, again.total[name]), f"{method!r} must give {name} the same twice"
    if expected is not None:
        error = _relative_error(_tree.flatten(result.total), _tree.flatten(dict(expected)))
        assert error <= tolerance, f"{method!r} must be right to {tolerance}; got an error of {error:.2g}."


class _no_trace:
    """Asserts that weights, buffers, .grad, modes, flags and random state are the same at the end."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def _picture(self) -> dict[str, Any]:
        picture: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
        for side, module in (("model", self._problem.model), ("hyper", self._problem.hyper)):
            for name, p in module.named_parameters():
                picture[f"{side}.{name}"] = p.detach().clone()
                picture[f"{side}.{name}.grad"] = None if p.grad is None else p.grad.clone()
                picture[f"{side}.{name}.requires_grad"] = p.requires_grad
            for name, buffer in module.named_buffers():
                picture[f"{side}.{name}"] = buffer.clone()
                picture[f"{side}.{name}.identity"] = id(buffer)
            for name, part in module.named_modules():
                picture[f"{side}.{name}.training"] = part.training
        return picture

    def __enter__(self) -> None:
        self._before = self._picture()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        after = self._picture()
        same: Callable[[Any, Any], bool] = lambda a, b: (  # noqa: E731
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        )
        changed = [name for name, value in self._before.items() if not same(value, after[name])]
        assert not changed, f"nothing may be left behind; changed: {changed}"


def _relative_error(measured: Tensor, expected: Tensor) -> float:
    scale = float(expected.norm())
    return float((measured - expected).norm()) / (scale or 1.0)


def _require(condition: bool, system: LinearSystem, required: str, got: object) -> None:
    assert condition, f"on the system {system.name!r}, required {required}; got {got}"
