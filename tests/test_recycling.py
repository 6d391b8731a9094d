"""What conjugate gradient keeps of earlier solves, and what its report tells."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse import _tree
from bestresponse.solvers import Status
from bestresponse.solvers.preconditioning import diagonal_inverse, pair, quasi_newton
from bestresponse.testing import linear_systems

SYSTEMS = {system.name: system for system in linear_systems()}
SCALES = ["definite", "definite, times 300", "definite, times 0.001"]


def dense_of(preconditioner, system):
    columns = [_tree.flatten(preconditioner(system.unflatten(e))) for e in torch.eye(9)]
    return torch.stack(columns, dim=1)


def pairs_of(system, count, damping):
    directions = [torch.randn(9) for _ in range(count)]
    matrix = system.matrix + damping * torch.eye(9)
    return [
        pair(system.unflatten(p), system.product(system.unflatten(p)), damping, float(p @ matrix @ p))
        for p in directions
    ]


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("with_diagonal", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_the_two_loop_recursion_is_the_bfgs_inverse(name, with_diagonal, damping):
    system = SYSTEMS[name]
    pairs = pairs_of(system, 4, damping)
    if with_diagonal:
        diagonal = system.unflatten(torch.diagonal(system.matrix).clone())
        initial = diagonal_inverse(diagonal, 0.1)
        expected = dense_of(initial, system)
    else:
        initial = None
        newest = pairs[-1][1]
        expected = torch.eye(9) / float(newest @ newest)
    for s, y in pairs:
        assert abs(float(s @ y) - 1) < 1e-12
        left = torch.eye(9) - torch.outer(s, y)
        expected = left @ expected @ left.T + torch.outer(s, s)
    got = dense_of(quasi_newton(pairs, initial), system)
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12 * float(expected.abs().max()))
    assert float(torch.linalg.eigvalsh((got + got.T) / 2)[0]) > 0
    s, y = pairs[-1]
    assert torch.allclose(got @ y, s)


@pytest.mark.parametrize("name", SCALES)
def test_a_second_solve_needs_hardly_a_step(name):
    system = SYSTEMS[name]
    solver = br.ConjugateGradient(max_steps=30, tolerance=1e-9, recycle=9)
    first = solver.solve(system.product, system.tree)
    again = solver.solve(system.product, system.tree, memory=first.memory)
    other = system.unflatten(torch.randn(9))
    with_pairs = solver.solve(system.product, other, memory=first.memory)
    without = solver.solve(system.product, other)
    assert first.report.steps == 9
    assert again.report.steps <= 2
    assert with_pairs.report.steps <= 3 < without.report.steps


def test_the_last_pairs_are_kept_and_those_of_failed_solves_are_not():
    system, bad = SYSTEMS["definite"], SYSTEMS["negative definite"]
    solver = br.ConjugateGradient(max_steps=3, recycle=5)
    memory = solver.solve(system.product, system.tree).memory
    assert len(memory["pairs"]) == 3
    later = solver.solve(system.product, system.unflatten(torch.randn(9)), memory=memory).memory
    assert len(later["pairs"]) == 5
    assert later["pairs"][0][0] is memory["pairs"][1][0]
    failed = solver.solve(bad.product, bad.tree, memory=later)
    assert failed.report.status is Status.NEGATIVE_CURVATURE
    assert failed.memory["pairs"] == later["pairs"]
    assert "pairs" not in br.ConjugateGradient(3).solve(system.product, system.tree).memory


def test_a_run_of_recycled_solves_beyond_rounding_stays_exact():
    # More steps than the system has dimensions: directions made of rounding must not undo what was reached.
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(14, 14, generator=generator, dtype=torch.float64))
    values = torch.logspace(-2, 1, 14, dtype=torch.float64)
    solver = br.ConjugateGradient(max_steps=12, tolerance=0.0, recycle=20)
    start, memory = None, None
    for step in range(40):
        matrix = q @ torch.diag(values * (1 + 0.01 * step)) @ q.T
        b = q @ torch.ones(14, dtype=torch.float64) + 0.01 * step
        solution = solver.solve(
            lambda v, matrix=matrix: {"w": matrix @ v["w"]}, {"w": b}, start=start, memory=memory
        )
        start, memory = solution.x, solution.memory
        assert not solution.report.status.failed
    exact = torch.linalg.solve(matrix, b)
    assert (start["w"] - exact).norm() < 1e-9 * exact.norm()


def test_a_solve_goes_on_below_the_precision_of_b_where_that_is_no_rounding():
    # A diagonal system mixes nothing, and its small components are exact far below ε ‖b‖.
    diagonal, b = torch.tensor([1.0, 1e-5]), torch.tensor([1.0, 1e-7])
    diagonal, b = diagonal.float(), b.float()
    solution = br.ConjugateGradient(20, tolerance=0.0).solve(lambda v: {"w": diagonal * v["w"]}, {"w": b})
    assert torch.allclose(solution.x["w"], torch.tensor([1.0, 1e-2]).float(), rtol=1e-5)


def test_a_solver_derived_from_conjugate_gradient_opens_as_itself():
    class Own(br.ConjugateGradient):
        pass

    own = Own(5)
    assert own.opening() is own


def test_a_first_solve_makes_the_steps_that_were_asked_for_and_more_while_its_residual_falls():
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))

    def solve(condition, max_steps, tolerance):
        matrix = q @ torch.diag(torch.logspace(-condition, 0, 60, dtype=torch.float64)) @ q.T
        solver = br.ConjugateGradient(max_steps, tolerance, damping=0.0).opening()
        b = {"w": torch.ones(60, dtype=torch.float64)}
        return solver.solve(lambda v: {"w": matrix @ v["w"]}, b).report

    near, middle, far, whole = (solve(*s, 0.0) for s in ((1, 12), (1.5, 3), (6, 3), (6, 30)))
    assert near.steps == 12
    assert near.residual < 1e-3
    assert 3 < middle.steps < 20
    assert middle.residual <= 0.1
    assert far.steps == 3  # more would follow the small curvatures of this one batch
    assert far.residual > 1.0
    assert whole.steps == 30
    assert solve(1, 12, 0.01).residual <= 0.01
    assert solve(1, 1, 0.0).residual <= 0.1


def test_pairs_of_another_precision_or_size_are_dropped():
    system = SYSTEMS["definite"]
    solver = br.ConjugateGradient(max_steps=3, recycle=5)
    memory = solver.solve(system.product, system.tree).memory
    single = {name: x.float() for name, x in system.tree.items()}

    def product(v):
        return {name: x.float() for name, x in system.product({n: x.double() for n, x in v.items()}).items()}

    assert len(solver.solve(product, single, memory=memory).memory["pairs"]) == 3
    small = {"first": torch.ones(3)}
    assert len(solver.solve(lambda v: v, small, memory=memory).memory["pairs"]) == 1


@pytest.mark.parametrize("damping", [0.0, 0.5, None])
def test_recycling_with_every_damping_and_diagonal_reaches_the_dense_answer(damping):
    system = SYSTEMS["definite, times 300"]
    diagonal = system.unflatten(torch.diagonal(system.matrix).clone())
    solver = br.ConjugateGradient(30, 1e-12, damping=damping, recycle=4, diagonal=True)
    memory = {}
    for _ in range(3):
        solution = solver.solve(system.product, system.tree, memory=memory, diagonal=diagonal)
        memory = solution.memory
        matrix = system.matrix + (solution.report.damping or 0.0) * torch.eye(9)
        assert torch.allclose(
            _tree.flatten(solution.x), torch.linalg.solve(matrix, system.b), rtol=1e-8, atol=1e-12
        )


def test_curvatures_far_apart_are_not_taken_for_rounding_under_a_preconditioner():
    matrix = torch.tensor([[1.0, 9e3], [9e3, 1e8]], dtype=torch.float32)
    b = {"w": torch.tensor([0.0, 1.0])}
    b = {name: x.float() for name, x in b.items()}
    solution = br.ConjugateGradient(20, damping=1e-6, diagonal=True).solve(
        lambda v: {"w": matrix @ v["w"]}, b, diagonal={"w": torch.diagonal(matrix).clone()}
    )
    expected = torch.linalg.solve(matrix.double(), b["w"].double())
    assert solution.report.status is Status.CONVERGED
    assert torch.allclose(solution.x["w"].double(), expected, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_solve_beyond_rounding_ends_converged_and_its_ritz_values_stay_true(dtype):
    for top in (1.01, 1.1, 100.0):
        values = torch.linspace(1, top, 50, dtype=dtype)
        b = {"w": torch.randn(50, dtype=dtype)}
        report = (
            br.ConjugateGradient(300, tolerance=0.0).solve(lambda v, d=values: {"w": d * v["w"]}, b).report
        )
        assert report.status in (Status.CONVERGED, Status.STEPS_USED)
        assert 0.95 < report.curvature[0] <= report.curvature[1] < 1.05 * top


@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize("name", [*SCALES, "indefinite"])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_ritz_values_are_those_of_the_krylov_space(name, steps, damping):
    system = SYSTEMS[name]
    damping *= float(system.matrix.abs().max())
    report = (
        br.ConjugateGradient(steps, tolerance=0.0, damping=damping).solve(system.product, system.tree).report
    )
    size = report.steps + (report.status is Status.NEGATIVE_CURVATURE)
    krylov, v = [], system.b
    for _ in range(size):
        krylov.append(v / v.norm())
        v = system.matrix @ krylov[-1]
    basis = torch.linalg.qr(torch.stack(krylov, dim=1)).Q
    values = torch.linalg.eigvalsh(basis.T @ system.matrix @ basis)
    scale = float(values.abs().max())
    assert abs(report.curvature[0] - float(values[0])) < 1e-6 * scale
    assert abs(report.curvature[1] - float(values[-1])) < 1e-6 * scale
    if name == "indefinite" and report.status is Status.NEGATIVE_CURVATURE:
        assert report.curvature[0] + damping < 0


def test_the_residual_vector_is_that_of_the_report():
    system = SYSTEMS["definite, times 0.001"]
    for solver, start in (
        (br.ConjugateGradient(3), None),
        (br.ConjugateGradient(3), system.unflatten(torch.linalg.solve(system.matrix, system.b) * 0.9)),
        (br.ConjugateGradient(3, damping=1e-3), None),
        (br.ConjugateGradient(3, recycle=2), None),
    ):
        solution = solver.solve(system.product, system.tree, start=start)
        x = _tree.flatten(solution.x)
        expected = system.b - system.matrix @ x - (solution.report.damping or 0.0) * x
        got = _tree.flatten(solution.residual)
        assert torch.allclose(got, expected, rtol=1e-8, atol=1e-9 * float(system.b.norm()))
        assert abs(float(got.norm() / system.b.norm()) / solution.report.residual - 1) < 1e-6
    assert br.ConjugateGradient(3).solve(lambda v: _tree.scale(v, -1.0), system.tree).residual is None


def regression(seed, log_decay):
    """Softmax regression on features of falling size, some steps into its training."""
    torch.manual_seed(seed)
    x, x_val = (torch.randn(60, 20) * torch.logspace(0, -1.5, 20) for _ in range(2))
    y, y_val = (torch.randint(4, (60,)) for _ in range(2))
    model = nn.Linear(20, 4)
    decay = br.hyperparameters.WeightDecay(model, initial=float(torch.tensor(log_decay).exp()))

    def train_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model)

    def val_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = br.Problem(model, decay, train_loss, val_loss)
    optimizer = torch.optim.Adam(problem.weights.values(), 0.05)
    for _ in range(50):
        optimizer.zero_grad()
        train_loss(model, decay, (x, y)).backward(inputs=list(problem.weights.values()))
        optimizer.step()
    return problem, (x, y), (x_val, y_val)


def test_the_estimated_error_is_right_to_a_factor_of_three_in_nine_cases_of_ten():
    ratios = []
    for seed in range(6):
        for log_decay in (-4.0, -2.0):
            problem, train, val = regression(seed, log_decay)
            exact = br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
            for steps in (2, 5, 10, 20):
                h = br.hypergradient(problem, train, val, br.Implicit(br.ConjugateGradient(steps)))
                true = _tree.norm(_tree.add(h.total, exact.total, -1.0)) / exact.norm
                ratios.append(h.solve.hypergradient_error / true)
    within = sum(1 / 3 <= ratio <= 3 for ratio in ratios) / len(ratios)
    assert within >= 0.9
    assert max(ratios) > 1 > min(ratios)  # it is neither always above nor always below


def test_the_estimate_changes_nothing_and_may_be_left_out():
    problem, train, val = cases.network()
    with_it = br.hypergradient(problem, train, val, br.Implicit(br.ConjugateGradient(3, damping=1.0)))
    method = br.Implicit(br.ConjugateGradient(3, damping=1.0), estimate_error=False)
    without = br.hypergradient(problem, train, val, method)
    assert all(torch.equal(x, without.total[n]) for n, x in with_it.total.items())
    assert with_it.solve.hypergradient_error > 0
    assert without.solve.hypergradient_error is None
    assert br.hypergradient(problem, train, val, br.Implicit(br.Identity())).solve.hypergradient_error is None


def test_summary_prints_what_is_known(capsys):
    problem, train, val = cases.network()
    br.hypergradient(problem, train, val, br.Implicit(br.ConjugateGradient(3, damping=1.0))).summary()
    text = capsys.readouterr().out
    for words in (
        "log_decay.0.weight",
        "all together",
        "Solve: steps used",
        "relative residual",
        "estimated error of the hypergradient",
        "damping",
        "curvature",
    ):
        assert words in text
    br.hypergradient(problem, train, val, br.Unrolled(2, 0.1)).summary()
    assert "No linear solve." in capsys.readouterr().out


def test_the_report_says_what_a_rest_by_difference_costs():
    problem, train, val = cases.network()
    curvature = br.GaussNewton(
        lambda model, decay, batch: model(batch[0]), lambda outputs, batch: F.cross_entropy(outputs, batch[1])
    )
    report = br.hypergradient(problem, train, val, br.Implicit(curvature=curvature)).solve
    assert "rest by difference" in report.detail
    assert "rest by difference" in str(report)
