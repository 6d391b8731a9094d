"""Random systems: definite, indefinite and singular, conditions 1 to 1e10, both precisions, scales 1e±30."""

import itertools
import math

import pytest
import torch

import bestresponse as br
from bestresponse.solvers import GMRES, SOBA, Status
from conftest import SEED

KINDS = ["definite", "indefinite", "singular, consistent", "singular"]
SOLVERS = {
    "conjugate gradient": lambda steps: br.ConjugateGradient(steps),
    "conjugate gradient that chooses its damping": lambda steps: br.ConjugateGradient(steps, damping=None),
    "MINRES": lambda steps: br.MINRES(steps),
    "GMRES": lambda steps: GMRES(steps),
    "Neumann": lambda steps: br.Neumann(steps),
    "SOBA": lambda steps: SOBA(steps),
    "Nystrom": lambda steps: br.Nystrom(min(steps, 20)),
}


def draw(generator, kind, condition, dtype, scale, size):
    """A symmetric matrix with eigenvalues from 1 down to 1 / condition, times the scale, and a right-hand side."""
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    values = torch.logspace(0, -math.log10(condition), size)
    if kind == "indefinite":
        values *= torch.randint(2, (size,), generator=generator) * 2 - 1
    if kind.startswith("singular"):
        values[torch.randperm(size, generator=generator)[: size // 3]] = 0.0
    matrix = (basis * values) @ basis.T
    b = torch.randn(size, generator=generator)
    if kind == "singular, consistent":
        b = matrix @ b
    return (scale * (matrix + matrix.T) / 2).to(dtype), b.to(dtype)


def grid():
    generator = torch.Generator().manual_seed(SEED)
    conditions, dtypes = (1e0, 1e2, 1e4, 1e6, 1e10), (torch.float32, torch.float64)
    for kind, condition, dtype, scale in itertools.product(KINDS, conditions, dtypes, (1e-30, 1.0, 1e30)):
        if scale == 1e-30 and dtype == torch.float32 and condition >= 1e6:
            continue  # the solution is larger than float32 holds
        size = 6 if condition in (1e2, 1e6) else 16
        yield (kind, condition, dtype, scale), *draw(generator, kind, condition, dtype, scale, size)


def solve(solver, matrix, b):
    return solver.solve(lambda v: {"w": matrix @ v["w"]}, {"w": b})


def relative_residual(matrix, b, x, damping):
    matrix, b, x = matrix.double(), b.double(), x.double()
    return float((b - matrix @ x - damping * x).norm() / b.norm())


def precision(matrix, b, x, damping):
    """ε ‖A + δI‖ ‖x‖ / ‖b‖: what rounding leaves of a residual."""
    size = float(torch.linalg.matrix_norm(matrix.double(), 2)) + damping
    return torch.finfo(b.dtype).eps * size * float(x.double().norm() / b.double().norm())


@pytest.mark.parametrize("name", SOLVERS)
def test_reported_residuals_are_true_and_more_steps_are_not_worse(name):
    for case, matrix, b in grid():
        earlier = None
        for steps in (3, len(b), 3 * len(b)):
            solution = solve(SOLVERS[name](steps), matrix, b)
            x, report = solution.x["w"], solution.report
            damping = report.damping or 0.0
            true = relative_residual(matrix, b, x, damping)
            rounding = precision(matrix, b, x, damping) + 10 * torch.finfo(b.dtype).eps
            told = (case, steps, true, report)
            assert x.isfinite().all(), told
            if report.residual is None:
                assert report.status is not Status.CONVERGED, told
            else:
                assert true <= 3.0 * report.residual + rounding, told
                if name not in ("Neumann", "SOBA"):  # theirs is that of the iterate before
                    assert report.residual <= 3.0 * true + 4.0 * rounding, told
            if report.status is Status.CONVERGED:
                assert true <= 1e-2, told
            if report.status.failed:
                assert true <= 1.0 + 1e-3 + rounding, told
            if name in ("MINRES", "GMRES") and earlier is not None:
                assert true <= 3.0 * earlier + 10.0 * rounding, (*told, earlier)
            earlier = true


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e4])
def test_conjugate_gradient_in_float32_ends_where_the_precision_ends(condition):
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(4):
        matrix, b = draw(generator, "definite", condition, torch.float32, 1.0, 60)
        exact = torch.linalg.solve(matrix.double(), b.double())
        errors = []
        for steps in (150, 300, 600, 1200):
            x = solve(br.ConjugateGradient(steps), matrix, b).x["w"].double()
            errors.append(float((x - exact).norm() / exact.norm()))
        assert max(errors) <= 3.0 * errors[0]
        assert errors[-1] <= 10.0 * condition * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [15, 40, 80])
def test_minres_stays_at_the_least_squares_solution_of_a_singular_system(size):
    """Rounding makes the recurrences grow without bound once the Krylov space is exhausted."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(10):
        rows = torch.randn(size // 3, size, generator=generator)
        matrix, b = rows.T @ rows, torch.randn(size, generator=generator)
        least = float((b - matrix @ (torch.linalg.pinv(matrix, hermitian=True) @ b)).norm() / b.norm())
        solution = solve(br.MINRES(10 * size), matrix, b)
        assert solution.report.status is Status.DIVERGED
        assert "no unique answer" in solution.report.detail
        assert relative_residual(matrix, b, solution.x["w"], 0.0) == pytest.approx(least, rel=1e-4)
        assert solution.report.residual == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("kind", ["definite", "indefinite"])
@pytest.mark.parametrize("minimal", [br.MINRES, GMRES])
def test_preconditioners_of_minimal_residuals(minimal, kind):
    """A preconditioner changes the number of steps and not the answer; the best one needs one or two."""
    generator = torch.Generator().manual_seed(SEED)
    matrix, b = draw(generator, kind, 1e4, torch.float64, 1.0, 30)
    values, vectors = torch.linalg.eigh(matrix)
    absolute = vectors @ torch.diag(1.0 / values.abs()) @ vectors.T
    exact = torch.linalg.solve(matrix, b)
    plain = solve(minimal(400, 1e-9), matrix, b)
    helped = solve(minimal(400, 1e-9, preconditioner=lambda r: {"w": absolute @ r["w"]}), matrix, b)
    assert plain.report.status is helped.report.status is Status.CONVERGED
    assert torch.allclose(helped.x["w"], exact, rtol=1e-6, atol=1e-6 * float(exact.norm()))
    assert helped.report.steps <= 4 < 15 < plain.report.steps
    assert relative_residual(matrix, b, helped.x["w"], 0.0) <= 1e-9
    few = solve(minimal(1, 1e-9, preconditioner=lambda r: {"w": 0.5 * r["w"]}), matrix, b)
    assert few.report.residual == pytest.approx(relative_residual(matrix, b, few.x["w"], 0.0), rel=1e-9)
    with pytest.raises(br.Error, match="preconditioner must be a function"):
        minimal(3, preconditioner=3)


# --- systems that solvers have got wrong ------------------------------------------------------------------


def with_values(values, dtype=torch.float64):
    generator = torch.Generator().manual_seed(SEED)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator))[0]
    matrix = (basis * values) @ basis.T
    return ((matrix + matrix.T) / 2).to(dtype), torch.randn(len(values), generator=generator).to(dtype)


@pytest.mark.parametrize("minimal", [br.MINRES, GMRES])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_residual_of_zero_ends_a_solve(minimal, tolerance, dtype):
    for matrix in (torch.eye(3), 2.0 * torch.eye(3), torch.diag(torch.tensor([1.0, 2.0, 3.0]))):
        solution = solve(minimal(20, tolerance), matrix.to(dtype), torch.arange(1.0, 4.0).to(dtype))
        assert solution.report.residual <= 4 * torch.finfo(dtype).eps
        assert "singular" not in solution.report.detail


@pytest.mark.parametrize("minimal", [br.MINRES, GMRES])
@pytest.mark.parametrize(
    "values",
    [
        torch.cat([torch.tensor([1e4]), torch.linspace(0.5, 1.5, 29)]),
        torch.cat([torch.ones(15), torch.full((15,), 1e-3)]),
        torch.tensor([1.0, 0.1, 0.01]).repeat(10),
        torch.ones(30),
    ],
    ids=["outlier", "gap", "clusters", "identity"],
)
def test_an_ill_conditioned_system_is_not_called_singular(minimal, values):
    matrix, b = with_values(values, torch.float32)
    exact = torch.linalg.solve(matrix.double(), b.double())
    for steps in (20, 100):
        solution = solve(minimal(steps), matrix, b)
        assert not solution.report.status.failed
        assert "singular" not in solution.report.detail
        assert float((solution.x["w"].double() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("minimal", [br.MINRES, GMRES])
@pytest.mark.parametrize("steps", [10, 30, 300])
def test_a_singular_system_with_an_outlier_keeps_its_solution_short(minimal, steps):
    values = torch.cat([torch.tensor([1e4]), torch.linspace(0.5, 1.5, 9), torch.zeros(10)])
    matrix, b = with_values(values)
    least = torch.linalg.pinv(matrix, hermitian=True) @ b
    solution = solve(minimal(steps), matrix, b)
    assert float(solution.x["w"].norm()) < 100.0 * float(least.norm())
    smallest = float((b - matrix @ least).norm() / b.norm())
    assert smallest - 1e-9 <= solution.report.residual < (1.05 if steps == 10 else 1.001) * smallest + 1e-4


@pytest.mark.parametrize(
    "solver", [br.ConjugateGradient(40), br.MINRES(40), GMRES(40), br.Neumann(40), SOBA(40)], ids=repr
)
@pytest.mark.parametrize("last", [3, 11, 12, 25])
def test_a_product_that_is_not_finite_is_seen_wherever_it_comes(solver, last):
    matrix, b = with_values(torch.logspace(0, -3, 30))
    count = 0

    def product(v):
        nonlocal count
        count += 1
        return {"w": matrix @ v["w"] * (math.nan if count == last else 1.0)}

    solution = solver.solve(product, {"w": b})
    assert count < last or solution.report.status is Status.NOT_FINITE
    assert solution.x["w"].isfinite().all()
    assert solution.report.residual is None or math.isfinite(solution.report.residual)
    assert relative_residual(matrix, b, solution.x["w"], 0.0) <= 1.001 or type(solver) is br.ConjugateGradient


def test_a_failed_solve_is_no_worse_than_zero_though_its_start_was():
    matrix, b = torch.diag(torch.tensor([1.0, -0.5])), {"w": torch.ones(2)}
    product = lambda v: {"w": matrix @ v["w"]}  # noqa: E731
    skew = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    for solver, A in ((br.ConjugateGradient(5), product), (br.Exact(1e-3), lambda v: {"w": skew @ v["w"]})):
        solution = solver.solve(A, b, start={"w": torch.tensor([5.0, 1.0])})
        assert solution.report.status.failed
        assert solution.report.residual <= 1.0


@pytest.mark.parametrize("kind", [br.MINRES, GMRES, br.ConjugateGradient])
def test_reports_name_the_damping_of_solves_that_end_at_once(kind):
    product = lambda v: {"w": 0.5 * v["w"]}  # noqa: E731
    for b, start in ((torch.zeros(3), None), (torch.ones(3), {"w": torch.ones(3)})):
        solution = kind(5, damping=0.5).solve(product, {"w": b}, start=start)
        assert solution.report.status is Status.CONVERGED
        assert solution.report.damping == 0.5


def test_no_curvature_is_reported_that_a_preconditioner_made():
    matrix, b = torch.diag(torch.linspace(1.0, 2.0, 8)), torch.ones(8)
    for factor in (0.1, 5.0):
        solver = br.MINRES(20, damping=0.5, preconditioner=lambda r, f=factor: {"w": f * r["w"]})
        report = solve(solver, matrix, b).report
        assert report.status is Status.CONVERGED
        assert report.curvature is None
        assert report.detail == ""


def test_ritz_values_stay_in_the_spectrum_in_float32():
    for values in (torch.logspace(0, -4, 10), torch.cat([torch.tensor([1e4]), torch.linspace(0.5, 1.5, 20)])):
        matrix, b = with_values(values, torch.float32)
        low, high = solve(br.ConjugateGradient(200), matrix, b).report.curvature
        top = float(values.max())
        assert -1e-4 * top < low <= high < 1.01 * top
