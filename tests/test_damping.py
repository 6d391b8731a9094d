"""What damping does to a hypergradient, and what the report says of it."""

import math
import statistics
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import bestresponse as br
import cases
from bestresponse.solvers import Status
from conftest import SEED


class Vector(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.v = nn.Parameter(value.clone())


def quadratic(matrix, b, coupling):
    """L_T = wᵀA w / 2 − λᵀC w and L_V = bᵀw at its stationary point: dL_V/dλ = C A⁻¹b."""
    hyper = Vector(torch.randn(len(coupling)))
    model = Vector(torch.linalg.pinv(matrix) @ coupling.T @ hyper.v.detach())

    def train_loss(model, hyper, batch):
        return 0.5 * model.v @ matrix @ model.v - hyper.v @ (coupling @ model.v)

    return br.Problem(model, hyper, train_loss, lambda model, hyper, batch: b @ model.v)


def symmetric(values, generator):
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator))[0]
    return (basis * values) @ basis.T


@pytest.mark.parametrize("hyperparameters", [3, 40])
@pytest.mark.parametrize("damping", [1e-3, 1e-1])
@pytest.mark.parametrize("condition", [1e1, 1e4])
def test_the_effect_of_damping_is_estimated(condition, damping, hyperparameters):
    generator = torch.Generator().manual_seed(SEED)
    ratios = []
    for _ in range(25):
        matrix = symmetric(torch.logspace(0, -math.log10(condition), 40), generator)
        b = torch.randn(40, generator=generator)
        coupling = torch.randn(hyperparameters, 40, generator=generator)
        problem = quadratic(matrix, b, coupling)
        solver = br.ConjugateGradient(400, tolerance=1e-10, damping=damping)
        h = br.hypergradient(problem, None, None, br.Implicit(solver))
        undamped = coupling @ torch.linalg.solve(matrix, b)
        true = float((h.total["v"] - undamped).norm() / undamped.norm())
        ratios.append(h.solve.damping_effect / true)
        assert h.solve.hypergradient_error < 1e-6
    assert 0.5 < statistics.median(ratios) < 1.5
    assert sum(1 / 3 < ratio < 3 for ratio in ratios) >= 22


def test_small_curvatures_that_the_right_hand_side_hardly_asks_for_have_their_effect():
    """B lies along the large curvatures, and the undamped answer along the small ones."""
    generator = torch.Generator().manual_seed(SEED)
    values = torch.cat([torch.linspace(0.5, 1.0, 5), torch.full((35,), 1e-3)])
    matrix = symmetric(values, generator)
    problem = quadratic(matrix, matrix @ torch.randn(40, generator=generator), torch.eye(40))
    h = br.hypergradient(problem, None, None, br.Implicit(br.ConjugateGradient(200, 1e-10, damping=1e-3)))
    undamped = torch.linalg.solve(matrix, problem_right_hand_side(problem))
    true = float((h.total["v"] - undamped).norm() / undamped.norm())
    assert true > 0.2
    assert h.solve.damping_effect == pytest.approx(true, rel=0.2)


def problem_right_hand_side(problem):
    (b,) = torch.autograd.grad(problem.val_loss(problem.model, problem.hyper, None), [problem.model.v])
    return b


def test_a_singular_curvature_is_no_negative_one_by_rounding():
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(10):
        rows = torch.randn(3, 12, generator=generator)
        b = rows.T @ torch.randn(3, generator=generator)
        problem = quadratic(rows.T @ rows / 3 + 1e-30 * torch.eye(12), b, torch.eye(12))
        method = br.Implicit()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                report = br.hypergradient(problem, None, None, method).solve
                assert not report.status.failed


def test_the_direct_part_is_no_effect_of_damping():
    generator = torch.Generator().manual_seed(SEED)
    matrix = symmetric(torch.linspace(0.5, 2.0, 8), generator)
    problem = quadratic(matrix, torch.randn(8, generator=generator), torch.eye(8))
    plain = problem.val_loss
    effects = []
    for factor in (0.0, 1e6):
        problem.val_loss = lambda m, h, b, factor=factor: plain(m, h, b) + factor * h.v.sum()
        solver = br.ConjugateGradient(50, damping=0.5)
        effects.append(br.hypergradient(problem, None, None, br.Implicit(solver)).solve.damping_effect)
    assert effects[0] > 0.1
    assert effects[1] < 1e-5 * effects[0]


@pytest.mark.parametrize("b", [(1.0, -1.0, 2.0), (1.0, 1.0, 1.0), (0.1, 0.2, 3.0)])
def test_negative_curvature_has_no_unique_answer(b):
    """The damped system is solved to rounding; that is no answer to the question, and it is named."""
    matrix = torch.diag(torch.tensor([3.0, 1.0, -1.0]))
    problem = quadratic(matrix, torch.tensor(b), torch.eye(3))
    with pytest.warns(br.BestResponseWarning, match="no unique answer"):
        report = br.hypergradient(problem, None, None, br.Implicit()).solve
    assert report.status is Status.NEGATIVE_CURVATURE
    assert report.damping > 1.0
    assert report.damping_effect is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h = br.hypergradient(problem, None, None, br.Implicit(br.MINRES(5)))
    assert torch.allclose(h.total["v"], torch.linalg.solve(matrix, torch.tensor(b)))
    assert "no unique answer: negative curvature" in h.solve.detail


def test_without_damping_there_is_no_effect():
    problem, train, val = cases.network()
    h = br.hypergradient(problem, train, val, br.Implicit(br.MINRES(5)))
    assert h.solve.damping is h.solve.damping_effect is None


def test_a_failure_of_a_second_solver_is_not_hidden_by_the_first():
    problem = quadratic(-torch.eye(3), torch.ones(3), torch.eye(3))
    for solver in (br.ConjugateGradient(3), br.ConjugateGradient(4), br.Neumann(5)):
        with pytest.warns(br.BestResponseWarning, match="the linear solve ended"):
            br.hypergradient(problem, None, None, br.Implicit(solver))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        br.hypergradient(problem, None, None, br.Implicit(br.ConjugateGradient(3)))


def test_a_run_on_batches_of_singular_curvature_goes_downhill():
    """Batches of 40 rows over 60 weights: a solve that follows one batch to the end follows its null space."""
    generator = torch.Generator().manual_seed(0)
    n, d, rows = 640, 60, 40
    scale = torch.logspace(-0.5, 0, d)
    x, x_val = (torch.randn(n, d, generator=generator) * scale for _ in range(2))
    a, a_val = (torch.randn(n, d, generator=generator) for _ in range(2))
    coupling = 0.1 * torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    matrix, matrix_val = x.T @ x / n, x_val.T @ x_val / n

    def train_loss(model, hyper, batch):
        return (
            0.5 * (batch[0] @ model.v).square().mean()
            + hyper.v @ (coupling @ model.v)
            + batch[1].mean(0) @ model.v
        )

    def val_loss(model, hyper, batch):
        fit = 0.5 * (batch[0] @ model.v).square().mean() + batch[1].mean(0) @ model.v
        return fit + 0.05 * hyper.v.square().sum()

    def slope(hyper):
        w = torch.linalg.solve(matrix, -a.mean(0) - coupling.T @ hyper)
        right = matrix_val @ w + a_val.mean(0)
        return float((0.1 * hyper - coupling @ torch.linalg.solve(matrix, right)).square().sum())

    def run(method):
        model, hyper = Vector(torch.zeros(d)), Vector(-2 * torch.ones(d))
        problem = br.Problem(model, hyper, train_loss, val_loss)
        optimizers = (torch.optim.SGD([module.v], 0.1) for module in (model, hyper))
        tuner = br.Tuner(problem, *optimizers, method, weight_steps=5)
        batches, val_batches = (
            [(u[i : i + rows], v[i : i + rows]) for i in range(0, n, rows)]
            for u, v in ((x, a), (x_val, a_val))
        )
        slopes = [slope(hyper.v.detach())]
        for steps in (1, 29, 30, 60):
            tuner.fit(batches, val_batches, steps)
            slopes.append(slope(hyper.v.detach()))
        return slopes

    own, minimal = run(br.Implicit()), run(br.Implicit(br.MINRES(4)))
    assert own == sorted(own, reverse=True)
    assert all(mine <= 2.0 * other for mine, other in zip(own, minimal, strict=True))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_chosen_damping_follows_what_the_last_solution_says_of_the_next_system(scale):
    generator = torch.Generator().manual_seed(SEED)
    matrix = scale * symmetric(torch.linspace(0.3, 1.0, 20), generator)
    solver = br.ConjugateGradient(6, damping=None)
    found = {}
    for kind in ("the same system", "another right-hand side each time"):
        b, memory, start = torch.randn(20, generator=generator), {}, None
        for _ in range(40):
            solution = solver.solve(lambda v: {"w": matrix @ v["w"]}, {"w": b}, start=start, memory=memory)
            memory, start = solution.memory, solution.x
            if kind.startswith("another"):
                b = torch.randn(20, generator=generator)
        found[kind] = solution.report.damping / scale
    same, another = found.values()
    assert 2e-5 < same < 2e-4  # 1e-4 of the largest curvature that the last solve met
    assert 0.004 < another < 0.02


POSITIVE = (3.0, 2.0, 1.5, 1.0, 0.5, 0.2)


def solved(solver, matrix, b, last=None):
    """A solve from the last solution."""
    start, memory = (None, None) if last is None else (last.x, last.memory)
    return solver.solve(lambda v: {"x": matrix @ v["x"]}, {"x": b}, start=start, memory=memory)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_along_a_run_the_iterate_before_negative_curvature_is_kept(scale):
    generator = torch.Generator().manual_seed(0)  # one random system in 400 drops a start
    solver = br.ConjugateGradient(4, damping=None)
    definite = symmetric(scale * torch.tensor(POSITIVE), generator)
    last = None
    for _ in range(4):
        last = solved(solver, definite, torch.randn(6, generator=generator), last)
    damping, before = last.memory["damping"], last.x["x"]
    # The start lies along the first eigenvector, so that it is kept.
    basis = torch.linalg.qr(torch.cat([before[:, None], torch.randn(6, 5, generator=generator)], dim=1))[0]
    matrix = (basis * (scale * torch.tensor([*POSITIVE[:5], -2.0]))) @ basis.T
    # The first direction is the residual, along which the curvature is positive; along the second one it is not.
    residual = 3 * basis[:, 1] + basis[:, 5]
    damped = matrix + damping * torch.eye(6)
    cut = solved(solver, matrix, damped @ before + residual, last)
    assert (cut.report.status, cut.report.steps, cut.report.products) == (Status.STEPS_USED, 1, 3)
    assert cut.report.indefinite
    assert "ended before negative curvature" in cut.report.detail
    along = residual @ damped @ residual / (residual @ residual)
    torch.testing.assert_close(cut.x["x"], before + residual / along)
    assert cut.memory["limit"] == 1

    last, steps = solved(solver, definite, torch.randn(6, generator=generator), None), []
    last = replace(last, memory=last.memory | {"limit": 1, "undisturbed": 0})
    for _ in range(70):
        last = solved(solver, definite, torch.randn(6, generator=generator), last)
        steps.append(last.report.steps)
    assert steps == [1] * 20 + [2] * 20 + [3] * 20 + [4] * 10


@pytest.mark.parametrize(("limit", "after"), [(4, 4), (3, 2), (1, 1)])
def test_a_start_that_is_dropped_makes_the_next_solves_shorter_if_negative_curvature_was_met(limit, after):
    generator = torch.Generator().manual_seed(SEED)
    solver, matrix = br.ConjugateGradient(4, damping=None), symmetric(torch.tensor(POSITIVE), generator)
    last = solved(solver, matrix, torch.randn(6, generator=generator))
    last = replace(last, memory=last.memory | {"limit": limit})
    last = solved(solver, matrix, 1e-4 * torch.randn(6, generator=generator), last)
    assert not last.report.warm
    assert last.memory["limit"] == after
    last = solved(solver, matrix, 1e-4 * torch.randn(6, generator=generator), last)
    assert last.report.warm
    assert last.report.steps == after


def test_single_solves_make_all_their_steps():
    generator = torch.Generator().manual_seed(SEED)
    solver, memory = br.ConjugateGradient(4, damping=None), {"limit": 1, "damping": 0.1}
    for _ in range(3):
        matrix = symmetric(torch.tensor(POSITIVE), generator)
        b = {"x": torch.randn(6, generator=generator)}
        solution = solver.solve(lambda v, m=matrix: {"x": m @ v["x"]}, b, memory=memory)
        memory = solution.memory
        assert solution.report.steps == 4
