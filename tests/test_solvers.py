import math
import threading
import warnings

import pytest
import torch

import bestresponse as br
from bestresponse import _tree
from bestresponse.solvers import Status
from bestresponse.solvers.blockwise import Blockwise
from bestresponse.testing import check_solver, linear_systems
from conftest import SEED

# A scale of Neumann's own is found for each system; a fixed one suits systems of its size only.
CONVERGENT = [
    br.Neumann(terms=150),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12),
    br.ConjugateGradient(max_steps=30, tolerance=1e-10),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12, damping=0.1),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12, damping=2.0),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12, damping=None),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12, recycle=4),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12, damping=None, recycle=3, diagonal=True),
    br.ConjugateGradient(max_steps=30, tolerance=1e-12, damping=0.1, recycle=20),
    br.Exact(),
    br.Exact(damping=0.1),
    br.Exact(damping=2.0),
    *(br.Nystrom(20, damping) for damping in (0.0, 0.1, 2.0)),
    *(kind(30, 1e-12, damping) for kind in (br.MINRES, br.solvers.GMRES) for damping in (0.0, 0.1, 2.0)),
]
MINIMAL = [br.MINRES, br.solvers.GMRES]

SYSTEMS = {system.name: system for system in linear_systems(SEED)}


@pytest.mark.filterwarnings("ignore:Exact needs an invertible")
@pytest.mark.parametrize("solver", CONVERGENT, ids=repr)
def test_solver_against_the_dense_answer(solver):
    check_solver(solver, seed=SEED)


@pytest.mark.parametrize("scale", [0.1, 0.4])
@pytest.mark.parametrize("terms", [0, 1, 7])
def test_neumann_is_the_scaled_truncated_series(terms, scale):
    system = SYSTEMS["definite"]
    solution = br.Neumann(terms=terms, scale=scale).solve(system.product, system.tree)
    step = torch.eye(9) - scale * system.matrix
    expected = scale * sum(torch.linalg.matrix_power(step, j) @ system.b for j in range(terms + 1))
    assert torch.allclose(_tree.flatten(solution.x), expected, rtol=1e-13, atol=0)
    assert solution.report.products == terms


@pytest.mark.parametrize("scale", [0.1, 0.4])
def test_neumann_with_a_fixed_scale_converges_to_the_inverse(scale):
    system = SYSTEMS["definite"]
    x = br.Neumann(terms=1000, scale=scale).solve(system.product, system.tree).x
    assert torch.allclose(_tree.flatten(x), torch.linalg.solve(system.matrix, system.b))


def test_neumann_says_when_a_fixed_scale_is_too_large():
    system = SYSTEMS["definite, times 300"]
    solution = br.Neumann(terms=50, scale=1.0).solve(system.product, system.tree)
    assert solution.report.status is Status.DIVERGED
    assert solution.report.products < 5
    assert system.residual(solution.x) <= 1.0


def test_neumann_slow_divergence_keeps_the_best_iterate():
    # 1.05 of the largest scale: the other directions shrink first, and one grows later.
    system = SYSTEMS["definite"]
    solver = br.Neumann(terms=400, scale=1.05)
    solution = solver.solve(system.product, system.tree)
    assert solution.report.status is Status.DIVERGED
    terms = range(solution.report.products + 1)
    residuals = [system.residual(br.Neumann(k, 1.05).solve(system.product, system.tree).x) for k in terms]
    assert system.residual(solution.x) == pytest.approx(min(residuals), rel=1e-9)
    assert solution.report.residual == pytest.approx(min(residuals), rel=1e-9)


def test_neumann_tells_negative_curvature_from_a_large_scale():
    system = SYSTEMS["negative definite"]
    for solver in (br.Neumann(terms=50, scale=0.3), br.Neumann(terms=50)):
        report = solver.solve(system.product, system.tree).report
        assert report.status is Status.NEGATIVE_CURVATURE


def test_neumann_lowers_a_scale_that_the_estimate_missed():
    # The right-hand side hides the largest eigenvalue from the first estimate but for rounding.
    values = torch.cat([torch.linspace(0.5, 1.0, 8), torch.tensor([1e6])])
    system = SYSTEMS["definite"]
    b = system.unflatten(torch.tensor([1.0] * 8 + [1e-56]))

    def product(v):
        return system.unflatten(values * _tree.flatten(v))

    solution = br.Neumann(terms=40).solve(product, b)
    assert not solution.report.status.failed
    assert "lowered" in solution.report.detail
    assert solution.report.scale < 2e-6


def test_neumann_refreshes_its_scale_at_two_products():
    small, large = SYSTEMS["definite"], SYSTEMS["definite, times 300"]
    solver = br.Neumann(terms=3)
    first = solver.solve(small.product, small.tree)
    assert first.report.products == 3 + 8
    second = solver.solve(small.product, small.tree, memory=first.memory)
    assert second.report.products == 3 + 2
    grown = solver.solve(large.product, large.tree, memory=second.memory)
    assert grown.report.scale < 2 / 600
    assert not grown.report.status.failed


def test_identity_returns_the_right_hand_side():
    system = SYSTEMS["definite"]
    solution = br.Identity().solve(system.product, system.tree)
    assert torch.allclose(_tree.flatten(solution.x), system.b, rtol=1e-15)
    assert solution.report.products == 0


def test_conjugate_gradient_returns_the_last_iterate():
    system = SYSTEMS["a multiple of the identity"]
    solution = br.ConjugateGradient(max_steps=1).solve(system.product, system.tree)
    assert torch.allclose(_tree.flatten(solution.x), system.b / 2)
    assert solution.report.status is Status.CONVERGED


def test_conjugate_gradient_minimises_over_the_krylov_space():
    system = SYSTEMS["definite"]
    for steps in range(1, 7):
        x = br.ConjugateGradient(steps, tolerance=0.0).solve(system.product, system.tree).x
        vectors = [system.b]
        for _ in range(steps - 1):
            vectors.append(system.matrix @ vectors[-1])
        basis, _ = torch.linalg.qr(torch.stack(vectors, dim=1))
        inner = torch.linalg.solve(basis.T @ system.matrix @ basis, basis.T @ system.b)
        assert torch.allclose(_tree.flatten(x), basis @ inner)


def test_conjugate_gradient_stops_on_a_relative_residual():
    system = SYSTEMS["definite, times 0.001"]
    for tolerance in (1e-1, 1e-4):
        solution = br.ConjugateGradient(20, tolerance=tolerance).solve(system.product, system.tree)
        assert solution.report.status is Status.CONVERGED
        assert system.residual(solution.x) <= tolerance
        assert solution.report.steps <= 9


@pytest.mark.parametrize("kind", [br.ConjugateGradient, br.MINRES, br.solvers.GMRES])
def test_a_tolerance_that_is_a_function_takes_the_number_of_solves(kind):
    with pytest.raises(br.errors.ArgumentTypeError, match=r"tolerance must be a function \(solves\); got"):
        kind(tolerance=lambda: 1.0)
    solver = kind(tolerance=lambda solves: 0.5**solves)
    with pytest.raises(br.Error, match=r"relative_residual needs .* a number; got a function"):
        _ = solver.relative_residual
    assert solver.present(2).relative_residual == 0.25


def test_conjugate_gradient_tolerance_of_a_warm_start_is_relative_to_b():
    system = SYSTEMS["definite"]
    near = br.ConjugateGradient(3).solve(system.product, system.tree).x
    solution = br.ConjugateGradient(20, tolerance=1e-3).solve(system.product, system.tree, start=near)
    assert solution.report.warm
    assert system.residual(solution.x) <= 1e-3
    assert solution.report.steps < 6
    assert solution.report.residual == pytest.approx(system.residual(solution.x), rel=1e-6)


def test_conjugate_gradient_recomputes_the_true_residual():
    generator = torch.Generator().manual_seed(1)
    basis, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator))
    matrix = basis @ torch.diag(torch.logspace(-6, 0, 60)) @ basis.T
    b = {"w": torch.randn(60, generator=generator)}
    report = br.ConjugateGradient(25, tolerance=0.0).solve(lambda v: {"w": matrix @ v["w"]}, b).report
    assert report.steps == 25
    assert report.products == 27


@pytest.mark.parametrize("name", ["indefinite", "negative definite", "zero"])
def test_conjugate_gradient_stops_at_negative_or_zero_curvature(name):
    system = SYSTEMS[name]
    solution = br.ConjugateGradient(20).solve(system.product, system.tree)
    assert solution.report.status is Status.NEGATIVE_CURVATURE
    assert system.residual(solution.x) <= 1.0 + 1e-12
    assert solution.report.curvature[0] <= 0.0


def test_conjugate_gradient_best_iterate_is_the_best_of_all():
    system = SYSTEMS["indefinite"]
    solution = br.ConjugateGradient(20).solve(system.product, system.tree)
    steps = solution.report.steps
    earlier = [
        system.residual(br.ConjugateGradient(k, 0.0).solve(system.product, system.tree).x)
        for k in range(1, steps + 1)
    ]
    assert solution.report.residual == pytest.approx(min([1.0, *earlier]), rel=1e-9)
    assert system.residual(solution.x) == pytest.approx(solution.report.residual, rel=1e-9)


def test_chosen_damping_is_raised_at_negative_curvature_and_kept():
    system = SYSTEMS["indefinite"]
    solver = br.ConjugateGradient(20, damping=None)
    solution = solver.solve(system.product, system.tree)
    assert solution.report.status is Status.CONVERGED
    assert solution.report.damping > 1.0
    assert "raised" in solution.report.detail
    assert system.residual(solution.x, solution.report.damping) <= 1e-6
    later = solver.solve(system.product, system.tree, memory=solution.memory)
    assert later.report.damping > 0.1


def test_chosen_damping_falls_again_on_systems_that_need_none():
    solver = br.ConjugateGradient(20, damping=None)
    indefinite, definite = SYSTEMS["indefinite"], SYSTEMS["definite"]
    raised = solver.solve(indefinite.product, indefinite.tree)
    memory, chosen = raised.memory, [raised.report.damping]
    for _ in range(30):
        solution = solver.solve(definite.product, definite.tree, memory=memory)
        memory = solution.memory
        chosen.append(solution.report.damping or 0.0)
    assert chosen[0] > 1.0
    assert chosen[-1] < 1e-2
    exact = torch.linalg.solve(definite.matrix, definite.b)
    assert float((_tree.flatten(solution.x) - exact).norm() / exact.norm()) < 1e-2


def test_the_chosen_damping_does_not_rise_on_a_system_that_stays_the_same():
    generator = torch.Generator().manual_seed(SEED)
    basis, _ = torch.linalg.qr(torch.randn(20, 20, generator=generator))
    matrix = basis @ torch.diag(torch.logspace(-2, 0, 20)) @ basis.T
    b, solver = {"w": torch.randn(20, generator=generator)}, br.ConjugateGradient(4, damping=None)
    exact, memory, start = torch.linalg.solve(matrix, b["w"]), {}, None
    errors = []
    for _ in range(12):
        solution = solver.solve(lambda v: {"w": matrix @ v["w"]}, b, start=start, memory=memory)
        memory, start = solution.memory, solution.x
        assert solution.report.damping < 2e-4
        errors.append(float((start["w"] - exact).norm() / exact.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05  # the largest of 1,500 such systems is 0.025


def test_chosen_damping_outlives_a_solve_that_had_nothing_to_do():
    system = SYSTEMS["definite"]
    solver = br.ConjugateGradient(20, tolerance=1e-3, damping=None)
    first = solver.solve(system.product, system.tree)
    second = solver.solve(system.product, system.tree, start=first.x, memory=first.memory)
    third = solver.solve(system.product, system.tree, start=second.x, memory=second.memory)
    assert second.report.products == third.report.products == 1
    assert third.report.warm


def test_diagonal_preconditioner_solves_a_diagonal_system_in_few_steps():
    values = torch.logspace(-6, 2, 9)
    system = SYSTEMS["definite"]

    def product(v):
        return system.unflatten(values * _tree.flatten(v))

    diagonal = system.unflatten(values)
    plain = br.ConjugateGradient(6, diagonal=True).solve(product, system.tree)
    helped = br.ConjugateGradient(6, diagonal=True, damping=1e-6).solve(
        product, system.tree, diagonal=diagonal
    )
    assert plain.report.residual > 1e-2
    assert helped.report.residual < 1e-6


def test_exact_gives_the_least_squares_solution_and_names_the_rank():
    system = SYSTEMS["singular"]
    with pytest.warns(br.BestResponseWarning, match="rank 7 of 9"):
        solution = br.Exact().solve(system.product, system.tree)
    expected = torch.linalg.pinv(system.matrix, hermitian=True) @ system.b
    assert torch.allclose(_tree.flatten(solution.x), expected)


def test_exact_solves_indefinite_systems():
    system = SYSTEMS["indefinite"]
    solution = br.Exact().solve(system.product, system.tree)
    assert torch.allclose(_tree.flatten(solution.x), torch.linalg.solve(system.matrix, system.b))


def test_exact_refuses_large_systems():
    system = SYSTEMS["definite"]
    with pytest.raises(br.Error, match="at most limit=5 weights; got 9"):
        br.Exact(limit=5).solve(system.product, system.tree)


def test_exact_reuses_its_matrix_as_often_as_it_may():
    """A moved matrix: the answers are those of the first one until the matrix is made again."""
    first, second = (SYSTEMS[name].matrix for name in ("definite", "indefinite"))
    solver, memory, products = br.Exact(0.1, reuse=2), {}, []
    generator = torch.Generator().manual_seed(SEED)
    for matrix, met in ((first, first), (second, first), (second, first), (second, second)):
        b = torch.randn(9, generator=generator)
        solution = solver.solve(lambda v, m=matrix: {"w": m @ v["w"]}, {"w": b}, memory=memory)
        memory = solution.memory
        products.append(solution.report.products)
        expected = torch.linalg.solve(met + 0.1 * torch.eye(9), b)
        torch.testing.assert_close(solution.x["w"], expected, rtol=1e-8, atol=1e-10)
    assert products == [9, 0, 0, 9]
    shorter = solver.solve(lambda v: v, {"w": torch.ones(5)}, memory=memory)
    assert shorter.report.products == 5  # another size: the matrix is made again
    assert br.Exact().solve(lambda v: v, {"w": torch.ones(5)}).memory == {}


def test_a_kept_matrix_with_zero_rows_serves_right_hand_sides_within_and_outside_them():
    matrix, solver, memory = torch.diag(torch.tensor([2.0, 0.0, 4.0])), br.Exact(reuse=5), {}
    found = []
    for b in ([2.0, 0.0, 4.0], [2.0, 3.0, 4.0], [4.0, 0.0, 4.0]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # only the solve that makes the matrix names its rank
            solution = solver.solve(lambda v: {"w": matrix @ v["w"]}, {"w": torch.tensor(b)}, memory=memory)
        memory = solution.memory
        found.append((solution.x["w"].tolist(), solution.report.status))
    assert found[0] == (pytest.approx([1.0, 0.0, 1.0]), Status.CONVERGED)
    assert found[1][1] is Status.DIVERGED  # no solution
    assert found[2] == (pytest.approx([2.0, 0.0, 1.0]), Status.CONVERGED)


class Given(br.solvers.Preconditioner):
    """The dense inverse of a matrix with damping."""

    detail = "dense"

    def __init__(self, matrix):
        self.matrix = matrix

    def make_preconditioner(self, passes, batch):
        return self

    def at(self, damping):
        damped = self.matrix + damping * torch.eye(len(self.matrix))
        return lambda r: {"w": torch.linalg.solve(damped, r["w"])}


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_inverse_is_the_inverse_of_a_curvature_without_products(damping):
    matrix, b = SYSTEMS["definite"].matrix, {"w": 7.0 * SYSTEMS["definite"].b}
    solver = br.solvers.Inverse(Given(matrix), damping)
    assert solver.wants.preconditioner is solver.curvature
    solution = solver.solve(lambda v: v, b, preconditioner=solver.curvature)
    expected = torch.linalg.solve(matrix + damping * torch.eye(9), b["w"])
    torch.testing.assert_close(solution.x["w"], expected, rtol=1e-10, atol=1e-12)
    report = solution.report
    assert (report.products, report.residual, report.status) == (0, None, Status.STEPS_USED)
    assert (report.damping, report.detail) == (damping or None, "dense")
    lost = Given(math.nan * matrix)
    assert solver.solve(lambda v: v, b, preconditioner=lost).report.status is Status.NOT_FINITE
    with pytest.raises(br.Error, match=r"needs a problem and a batch: solve through Implicit"):
        solver.solve(lambda v: v, b)


@pytest.mark.parametrize(
    "solver",
    [br.Neumann(5), br.Neumann(5, 0.1), br.ConjugateGradient(5), br.ConjugateGradient(5, damping=None)],
)
def test_products_that_are_not_finite_are_a_status(solver):
    system = SYSTEMS["definite"]
    calls = 0

    def product(v):
        nonlocal calls
        calls += 1
        return _tree.scale(system.product(v), math.nan if calls > 2 else 1.0)

    solution = solver.solve(product, system.tree)
    assert solution.report.status is Status.NOT_FINITE or "lowered" in solution.report.detail
    assert not _tree.not_finite(solution.x)


@pytest.mark.parametrize("solver", [br.Neumann(3), br.ConjugateGradient(3), br.Identity(), br.Exact()])
def test_float32_right_hand_sides_whose_squares_underflow(solver):
    matrix = torch.diag(torch.linspace(0.5, 2.0, 9, dtype=torch.float32))
    for factor in (1e-30, 1e30):
        b = {"w": torch.full((9,), factor, dtype=torch.float32)}
        x = solver.solve(lambda v: {"w": matrix @ v["w"]}, b).x["w"]
        assert x.isfinite().all()
        assert float(x.abs().min()) > 0.1 * factor


def test_a_bad_right_hand_side_is_named():
    system = SYSTEMS["definite"]
    b = system.tree
    b["second"][0] = math.nan
    with pytest.raises(br.Error, match="second"):
        br.ConjugateGradient().solve(system.product, b)


def test_products_of_another_layout_are_refused():
    system = SYSTEMS["definite"]
    with pytest.raises(br.Error, match="must have the names, shapes"):
        br.ConjugateGradient().solve(lambda v: {"first": v["first"]}, system.tree)
    with pytest.raises(br.Error, match=r"must have the names, shapes.*float32"):
        br.Neumann(2).solve(lambda v: {k: x.float() for k, x in v.items()}, system.tree)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: br.Neumann(terms=-1), "Neumann.terms"),
        (lambda: br.Neumann(terms=2.5), "Neumann.terms"),
        (lambda: br.Neumann(scale=0.0), "Neumann.scale"),
        (lambda: br.Neumann(scale=math.nan), "Neumann.scale"),
        (lambda: br.Neumann(scale="auto"), "Neumann.scale"),
        (lambda: br.ConjugateGradient(max_steps=0), "ConjugateGradient.max_steps"),
        (lambda: br.ConjugateGradient(tolerance=-1.0), "ConjugateGradient.tolerance"),
        (lambda: br.ConjugateGradient(damping=-1.0), "ConjugateGradient.damping"),
        (lambda: br.ConjugateGradient(damping=math.nan), "ConjugateGradient.damping"),
        (lambda: br.Exact(damping=-1.0), "Exact.damping"),
        (lambda: br.Exact(reuse=-1), "Exact.reuse"),
        (lambda: br.solvers.Inverse(br.Hessian()), "Inverse.curvature"),
        (lambda: br.solvers.Inverse(Given(torch.eye(2)), damping=-1.0), "Inverse.damping"),
    ],
)
def test_arguments_out_of_range(make, name):
    with pytest.raises(br.Error, match=name):
        make()


def test_no_warning_on_systems_that_are_solved():
    system = SYSTEMS["definite"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for solver in CONVERGENT:
            solver.solve(system.product, system.tree)


# --- minimal residuals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("name", ["indefinite", "negative definite", "definite", "definite, times 300"])
@pytest.mark.parametrize("kind", MINIMAL)
def test_minimal_residuals_solve_indefinite_systems(kind, name, damping):
    system = SYSTEMS[name]
    solution = kind(30, 1e-10, damping).solve(system.product, system.tree)
    matrix = system.matrix + damping * torch.eye(9)
    assert torch.allclose(_tree.flatten(solution.x), torch.linalg.solve(matrix, system.b), rtol=1e-8)
    report = solution.report
    values = torch.linalg.eigvalsh(system.matrix)
    assert report.status is Status.CONVERGED
    assert report.steps == 9
    assert report.products == 10  # *converged* is said of a residual that was computed
    assert report.curvature == pytest.approx((float(values[0]), float(values[-1])), rel=1e-6)
    assert ("negative curvature" in report.detail) == bool(values[0] < 0)


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["definite", "indefinite", "singular"])
@pytest.mark.parametrize("kind", MINIMAL)
def test_each_iterate_has_the_smallest_residual_of_its_krylov_space(kind, name, steps):
    system = SYSTEMS[name]
    solution = kind(steps, 0.0).solve(system.product, system.tree)
    powers = [system.b / system.b.norm()]
    for _ in range(steps - 1):
        following = system.matrix @ powers[-1]
        powers.append(following / following.norm())
    images = system.matrix @ torch.stack(powers, dim=1)
    best = (system.b - images @ torch.linalg.lstsq(images, system.b, driver="gelsd").solution).norm()
    assert system.residual(solution.x) == pytest.approx(float(best / system.b.norm()), rel=1e-6)
    assert solution.report.residual == pytest.approx(system.residual(solution.x), rel=1e-9)


@pytest.mark.parametrize("kind", MINIMAL)
def test_minimal_residuals_of_singular_systems(kind):
    """One with a solution is solved; one without ends with the smallest residual there is, and says so."""
    solvable, without, zero = (SYSTEMS[name] for name in ("singular, consistent", "singular", "zero"))
    solution = kind(30, 1e-10).solve(solvable.product, solvable.tree)
    assert solution.report.status is Status.CONVERGED
    assert solvable.residual(solution.x) < 1e-9
    assert torch.allclose(_tree.flatten(solution.x), torch.linalg.pinv(solvable.matrix) @ solvable.b)
    solution = kind(30, 1e-10).solve(without.product, without.tree)
    assert solution.report.status is Status.DIVERGED
    assert "singular" in solution.report.detail
    smallest = without.b - without.matrix @ torch.linalg.pinv(without.matrix) @ without.b
    assert without.residual(solution.x) == pytest.approx(float(smallest.norm() / without.b.norm()), rel=1e-6)
    assert _tree.norm(kind(30).solve(zero.product, zero.tree).x) == 0.0


def test_gmres_solves_what_is_not_symmetric():
    torch.manual_seed(0)
    system = SYSTEMS["definite"]
    matrix = system.matrix + 0.3 * torch.randn(9, 9)
    x = (
        br.solvers.GMRES(30, 1e-12)
        .solve(lambda v: system.unflatten(matrix @ _tree.flatten(v)), system.tree)
        .x
    )
    assert torch.allclose(_tree.flatten(x), torch.linalg.solve(matrix, system.b))


@pytest.mark.parametrize("kind", MINIMAL)
def test_minimal_residuals_start_warm_where_conjugate_gradient_may_not(kind):
    """xᵀA x < 0 says nothing against a start where A is not definite."""
    system = SYSTEMS["negative definite"]
    exact = torch.linalg.solve(system.matrix, system.b)
    start = system.unflatten(1.01 * exact)
    report = kind(30, 1e-10).solve(system.product, system.tree, start=start).report
    assert report.warm
    assert report.products == 1 + report.steps + 1


@pytest.mark.parametrize("kind", MINIMAL)
def test_minimal_residuals_meet_what_is_not_finite(kind):
    system = SYSTEMS["definite"]
    spoilt = kind(5).solve(lambda v: system.unflatten(math.nan * _tree.flatten(v)), system.tree)
    assert spoilt.report.status is Status.NOT_FINITE
    assert _tree.norm(spoilt.x) == 0.0
    for arguments in ({"max_steps": 0}, {"tolerance": -1.0}, {"damping": math.inf}):
        with pytest.raises(br.Error, match=f"{kind.__name__}.{next(iter(arguments))}"):
            kind(**arguments)


# --- Nyström ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("name", ["definite", "definite, times 300", "indefinite", "singular, consistent"])
@pytest.mark.filterwarnings("ignore:Exact needs an invertible")
def test_nystrom_of_full_rank_is_exact(name, damping):
    system = SYSTEMS[name]
    solution = br.Nystrom(9, damping).solve(system.product, system.tree)
    exact = br.Exact(damping).solve(system.product, system.tree)
    assert torch.allclose(_tree.flatten(solution.x), _tree.flatten(exact.x), rtol=1e-8)
    assert solution.report.products == 10
    assert solution.report.curvature == pytest.approx(exact.report.curvature, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("damping", [0.1, 0.7])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_nystrom_sees_a_few_large_eigenvalues_whole(scale, damping):
    """A of rank three: four products are enough, and the rest is the damping."""
    torch.manual_seed(0)
    factor = scale * torch.randn(40, 3)
    matrix, b = factor @ factor.T, torch.randn(40)
    solution = br.Nystrom(4, damping).solve(lambda v: {"w": matrix @ v["w"]}, {"w": b})
    expected = torch.linalg.solve(matrix + damping * torch.eye(40), b)
    assert torch.allclose(solution.x["w"], expected, rtol=1e-7, atol=1e-9)
    assert solution.report.products == 5
    assert solution.report.status is Status.CONVERGED


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_nystrom_is_the_inverse_of_its_approximation(rank):
    system, damping = SYSTEMS["definite"], 0.4
    solution = br.Nystrom(rank, damping).solve(system.product, system.tree)
    generator = torch.Generator().manual_seed(0)
    sketch, _ = torch.linalg.qr(torch.randn(9, rank, generator=generator))
    images = system.matrix @ sketch
    approximation = images @ torch.linalg.inv(sketch.T @ images) @ images.T
    expected = torch.linalg.solve(approximation + damping * torch.eye(9), system.b)
    found = _tree.flatten(solution.x)
    true = system.residual(solution.x, damping)
    if solution.report.status is Status.DIVERGED:
        expected_residual = (system.b - (system.matrix + damping * torch.eye(9)) @ expected).norm()
        assert expected_residual > system.b.norm()
        assert torch.equal(found, torch.zeros(9))
    else:
        assert torch.allclose(found, expected, rtol=1e-9)
        assert solution.report.residual == pytest.approx(true, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_nystrom_reuses_its_approximation_as_often_as_it_may(scale):
    """A moved matrix: the answers are those of the first one until the approximation is made again."""
    generator = torch.Generator().manual_seed(SEED)
    bases = [torch.linalg.qr(torch.randn(4, 4, generator=generator))[0] for _ in range(2)]
    first, second = (basis * (scale * torch.tensor([3.0, 2.0, 0.5, 0.1])) @ basis.T for basis in bases)
    solver, memory, damping = br.Nystrom(4, 0.1 * scale, reuse=2), {}, 0.1 * scale * torch.eye(4)
    products, expected = [], [first, first, first, second, second]
    for number, matrix in enumerate((first, second, second, second, second)):
        b = torch.randn(4, generator=generator)
        solution = solver.solve(lambda v, m=matrix: {"w": m @ v["w"]}, {"w": b}, memory=memory)
        memory = solution.memory
        products.append(solution.report.products)
        if solution.report.status is not Status.DIVERGED:
            x = torch.linalg.solve(expected[number] + damping, b)
            torch.testing.assert_close(solution.x["w"], x, rtol=1e-8, atol=1e-10)
            left = b - (matrix + damping) @ x
            assert solution.report.residual == pytest.approx(
                float(left.norm() / b.norm()), rel=1e-6, abs=1e-8
            )
    assert products == [5, 1, 1, 5, 1]
    longer = solver.solve(lambda v: v, {"w": torch.randn(5, generator=generator)}, memory=memory)
    assert longer.report.products == 5  # another size: the approximation is made again


def test_nystrom_meets_what_is_not_finite():
    system = SYSTEMS["definite"]
    spoilt = br.Nystrom(3).solve(lambda v: system.unflatten(math.nan * _tree.flatten(v)), system.tree)
    assert spoilt.report.status is Status.NOT_FINITE
    for arguments in ({"rank": 0}, {"damping": -1.0}, {"reuse": -1}):
        with pytest.raises(br.Error, match=f"Nystrom.{next(iter(arguments))}"):
            br.Nystrom(**arguments)


# --- SOBA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("step_size", [0.1, 0.4])
def test_soba_from_zero_is_the_series(step_size, steps):
    for system in linear_systems():
        if system.definite and system.name in ("definite", "a multiple of the identity"):
            one = br.solvers.SOBA(steps, step_size).solve(system.product, system.tree).x
            other = br.Neumann(steps - 1, step_size).solve(system.product, system.tree).x
            assert torch.allclose(_tree.flatten(one), _tree.flatten(other), atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_soba_along_a_run_of_noisy_systems_tends_to_the_mean(steps):
    system = next(linear_systems())
    generator = torch.Generator().manual_seed(0)
    exact = torch.linalg.solve(system.matrix, system.b)

    def error(solver, calls):
        x, memory = None, {}
        for _ in range(calls):
            noise = 0.3 * torch.randn(9, 9, generator=generator)
            matrix = system.matrix + (noise + noise.T) / 2
            b = system.unflatten(system.b + 0.3 * torch.randn(9, generator=generator))
            product = lambda v, A=matrix: system.unflatten(A @ _tree.flatten(v))  # noqa: E731
            solution = solver.solve(product, b, start=x, memory=memory)
            x, memory = solution.x, solution.memory
            assert solution.report.products == (steps if solution.report.warm else steps - 1)
        return float((_tree.flatten(x) - exact).norm() / exact.norm())

    constant = error(br.solvers.SOBA(steps, 0.3), 1000)
    falling = error(br.solvers.SOBA(steps, 0.3, decay=0.03), 1000)
    assert falling < 0.1
    assert falling < 0.5 * constant


@pytest.mark.parametrize("steps", [1, 2])
def test_soba_tells_of_a_step_that_is_too_large(steps):
    system = next(linear_systems())
    solver, x, memory, seen = br.solvers.SOBA(steps, 5.0), None, {}, set()
    for _ in range(8):
        solution = solver.solve(system.product, system.tree, start=x, memory=memory)
        x, memory = solution.x, solution.memory
        seen.add(solution.report.status)
    assert br.Status.DIVERGED in seen


def test_soba_tells_of_what_is_not_finite_and_keeps_its_count():
    system = next(linear_systems())
    nan = lambda v: {n: x * math.nan for n, x in v.items()}  # noqa: E731
    for step_size in (0.1, None):
        solver = br.solvers.SOBA(2, step_size, decay=0.1)
        first = solver.solve(system.product, system.tree)
        second = solver.solve(nan, system.tree, start=first.x, memory=first.memory)
        assert second.report.status is br.Status.NOT_FINITE
        assert second.memory["count"] == first.memory["count"] == 2


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"step_size": 0.0}, {"step_size": "1"}, {"decay": -1.0}])
def test_soba_arguments(arguments):
    with pytest.raises(br.Error, match="SOBA"):
        br.solvers.SOBA(**arguments)


def blocks():
    """A block-diagonal system with three blocks of unlike size and condition, and the matrix of each."""
    matrices = {}
    for k, size in enumerate((3, 5, 8)):
        root = torch.randn(size, size)
        matrices[f"block{k}"] = root @ root.T + 10.0**-k * torch.eye(size)
    b = {f"{name}.w": torch.randn(len(matrix)) for name, matrix in matrices.items()}
    return matrices, b


@pytest.mark.parametrize(
    "solver",
    [
        br.ConjugateGradient(4, damping=0.1),
        br.ConjugateGradient(3, damping=None, recycle=2),
        br.MINRES(3),
        br.Neumann(5),
        br.Exact(),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_each_block_of_a_system_has_a_solve_of_its_own(solver):
    matrices, b = blocks()
    calls = 0

    def product(v):
        nonlocal calls
        calls += 1
        return {name: matrices[name.split(".")[0]] @ x for name, x in v.items()}

    whole, memory, alone = Blockwise(solver), {}, {name: {} for name in matrices}
    for _ in range(2):
        calls = 0
        found = whole.solve(product, b, memory=memory)
        memory = found.memory
        counts = []
        for name, matrix in matrices.items():
            one = solver.solve(
                lambda v, m=matrix: {"w": m @ v["w"]}, {"w": b[f"{name}.w"]}, memory=alone[name]
            )
            alone[name] = one.memory
            assert torch.equal(found.x[f"{name}.w"], one.x["w"])
            counts.append(one.report.products)
        assert calls == found.report.products == max(counts)


def test_an_error_in_one_block_ends_all():
    matrices, b = blocks()
    before = threading.active_count()

    def product(v):
        raise ValueError("no product")

    with pytest.raises(ValueError, match="no product"):
        Blockwise(br.Exact()).solve(product, b)
    with pytest.raises(br.Error, match="limit=5"):
        Blockwise(br.Exact(limit=5)).solve(lambda v: v, b)
    assert threading.active_count() == before
