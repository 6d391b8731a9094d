import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse import _tree
from bestresponse.solvers.direct import dense
from bestresponse.testing import check_method, differences

# Solvers that reach the exact answer, with the tolerance that they should reach.
EXACT = {
    "Exact": (lambda: br.Exact(), 1e-8),
    "Exact, tiny damping": (lambda: br.Exact(damping=1e-10), 1e-7),
    "ConjugateGradient": (lambda: br.ConjugateGradient(max_steps=60, tolerance=1e-12), 1e-8),
    "ConjugateGradient, preconditioned": (
        lambda: br.ConjugateGradient(max_steps=60, tolerance=1e-12, diagonal=True),
        1e-8,
    ),
    "Neumann": (lambda: br.Neumann(terms=300), 1e-8),
    "Neumann, fixed scale": (lambda: br.Neumann(terms=500, scale=0.4), 1e-8),
}


@pytest.mark.filterwarnings("ignore:Exact needs an invertible")
@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_implicit_is_exact(case, solver):
    known = cases.EXACT_CASES[case]()
    make, tolerance = EXACT[solver]
    check_method(br.Implicit(make()), known.problem, known.train, known.val, known.expected, tolerance)


class Rated(nn.Module):
    """A decay, and the learning rate of the steps that are unrolled."""

    def __init__(self):
        super().__init__()
        self.log_decay, self.log_rate = (nn.Parameter(torch.tensor(value)) for value in (-1.0, -2.0))


def rated_problem():
    x, y = torch.randn(12, 4), torch.randn(12)

    def loss(model, hyper, batch):
        return (model(x).squeeze(1) - y).square().mean()

    def train(model, hyper, batch):
        return loss(model, hyper, batch) + hyper.log_decay.exp() * model.weight.square().sum()

    return br.Problem(nn.Linear(4, 1), Rated(), train, lambda m, h, b: loss(m, h, b) + 0.1 * m.weight.sum())


@pytest.mark.parametrize("last", [None, 2])
def test_a_learning_rate_is_tuned_through_the_steps(last):
    problem = rated_problem()
    tuned = br.Unrolled(4, lambda hyper: hyper.log_rate.exp(), last=last)
    h = br.hypergradient(problem, None, None, tuned)
    rate = problem.hyper.log_rate.exp().item()

    def differentiated(steps_at_rate):
        # The steps before the last ones are taken at the present rate, which is constant there.
        with torch.no_grad():
            problem.hyper.log_rate.fill_(steps_at_rate)
        moved = br.hypergradient(problem, None, None, br.Unrolled(4, lambda hyper: hyper.log_rate.exp()))
        return moved.val_loss

    if last is None:
        below, above = (differentiated(-2.0 + sign * 1e-5) for sign in (-1, 1))
        assert h.total["log_rate"].item() == pytest.approx((above - below) / 2e-5, rel=1e-6)
    else:
        full = br.hypergradient(problem, None, None, br.Unrolled(4, lambda hyper: hyper.log_rate.exp()))
        assert 0 < abs(h.total["log_rate"]) < abs(full.total["log_rate"])
    with torch.no_grad():
        problem.hyper.log_rate.fill_(-2.0)
    fixed = br.Problem(problem.model, nn.ParameterDict({"d": problem.hyper.log_decay}), lambda m, h, b:
        problem.train_loss(m, problem.hyper, b), problem.val_loss)  # fmt: skip
    same = br.hypergradient(fixed, None, None, br.Unrolled(4, rate, last=last))
    assert torch.allclose(h.total["log_decay"], same.total["d"], rtol=1e-10)


@pytest.mark.parametrize("rate", [lambda h: h.log_rate, lambda h: 0.1, lambda h: h.log_rate.exp().expand(3)])
def test_a_learning_rate_must_be_a_positive_scalar_tensor(rate):
    with pytest.raises(br.Error, match="step_size must return (a scalar tensor|positive)"):
        br.hypergradient(rated_problem(), None, None, br.Unrolled(2, rate))


@pytest.mark.filterwarnings("ignore:Exact needs an invertible")
@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_implicit_with_finite_differences_is_exact(case):
    known = cases.EXACT_CASES[case]()
    method = br.Implicit(br.Exact(), br.FiniteDifference())
    check_method(method, known.problem, known.train, known.val, known.expected, 2e-7)


CONVERGING = [
    br.ConjugateGradient(40, tolerance=1e-10, damping=1.0),
    br.MINRES(40, tolerance=1e-10, damping=0.1),
    br.solvers.GMRES(40, tolerance=1e-10, damping=1.0),
    br.Exact(),
    br.Exact(damping=0.1),
]
TRUNCATED = [
    br.Identity(),
    br.Neumann(7, 0.1),
    br.Neumann(7),
    br.ConjugateGradient(3),
    br.ConjugateGradient(5, damping=None),
    br.MINRES(3),
    br.solvers.GMRES(4),
    br.Nystrom(3, damping=0.1),
    br.Nystrom(5, damping=1.0),
    br.solvers.SOBA(5, 0.1),
    br.solvers.SOBA(5),
]
SYSTEMS = {
    "definite": lambda: (lambda c: (c.problem, c.train, c.val))(cases.ridge()),
    "indefinite": cases.network,
    "singular": lambda: cases.network(decayed=False),
}


def split(case):
    """The parts of a case's training loss: predict, loss of the outputs, losses of the examples, and the rest."""
    if case == "definite":
        squares = lambda z, b: (z - b[1]).square() / 2  # noqa: E731
        rest = lambda m, h, b: (h.log_decay.exp() * m.weight.square()).sum() / 2  # noqa: E731
        return lambda m, h, b: m(b[0])[:, 0], squares, rest
    losses = lambda z, b: F.cross_entropy(z, b[1], reduction="none")  # noqa: E731
    return lambda m, h, b: m(b[0]), losses, lambda m, h, b: h(m)


def curvature_of(kind, case):
    predict, losses, rest = split(case)
    mean = lambda z, b: losses(z, b).mean()  # noqa: E731
    return {
        "Hessian": lambda: br.Hessian(),
        "FiniteDifference": lambda: br.FiniteDifference(),
        "FiniteDifference, step": lambda: br.FiniteDifference(1e-5),
        "GaussNewton": lambda: br.GaussNewton(predict, mean, rest),
        "EmpiricalFisher": lambda: br.EmpiricalFisher(lambda m, h, b: losses(predict(m, h, b), b), rest),
        "KFAC": lambda: br.KFAC(predict, mean, rest),
    }[kind]()


CURVATURES = [
    "Hessian",
    "FiniteDifference",
    "FiniteDifference, step",
    "GaussNewton",
    "EmpiricalFisher",
    "KFAC",
]


@functools.cache
def known(system):
    """A system, with all that its hypergradient is made of but the curvature, from differences."""
    torch.manual_seed(0)
    problem, train, val = SYSTEMS[system]()
    mixed = differences(problem, train, problem.hyperparameters)
    live = [*problem.weights.values(), *problem.hyperparameters.values()]
    with problem.undisturbed() as passes:
        gradients = torch.autograd.grad(passes.val_loss(val), live, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(live, gradients, strict=True)]
    b = dict(zip(problem.weights, filled, strict=False))
    direct = torch.cat([g.view(-1) for g in filled[len(b) :]])
    return problem, train, val, b, direct, mixed


@functools.cache
def matrix_of(kind, system):
    problem, train, _, b, *_ = known(system)
    if kind.startswith(("Hessian", "FiniteDifference")):
        return differences(problem, train, problem.weights)
    with problem.undisturbed() as passes:  # tests of their own compare these with their definitions
        return dense(curvature_of(kind, system).linearise(passes, train), b)


# Each solver with each curvature once, and with each system twice.
GRID = [
    (solver, kind, list(SYSTEMS)[(i + j) % len(SYSTEMS)])
    for i, solver in enumerate(CONVERGING + TRUNCATED)
    for j, kind in enumerate(CURVATURES)
]


@pytest.mark.filterwarnings(
    "ignore:the linear solve ended", "ignore:Exact needs an invertible", "ignore:SOBA makes"
)
@pytest.mark.parametrize(("solver", "kind", "system"), GRID, ids=repr)
def test_every_solver_on_every_curvature(solver, kind, system):
    """dL_V/dλ = ∂L_V/∂λ − x ∂²L_T/∂w∂λ, with the dense (A + δI)⁻¹b for x, or what a truncated solver makes of A."""
    problem, train, val, b, direct, mixed = known(system)
    matrix = matrix_of(kind, system)
    if solver in CONVERGING:  # of smallest norm where A is singular
        damped = matrix + solver.damping * torch.eye(len(matrix))
        x = torch.linalg.pinv(damped, rtol=1e-6) @ _tree.flatten(b)
    else:
        dense_product = lambda v: _tree.unflatten(matrix @ _tree.flatten(v), b)  # noqa: E731
        x = _tree.flatten(solver.solve(dense_product, b).x)
    expected = direct - x @ mixed
    h = br.hypergradient(problem, train, val, br.Implicit(solver, curvature_of(kind, system)))
    assert torch.allclose(
        _tree.flatten(h.total), expected, rtol=1e-5, atol=1e-15 + 1e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_unrolled_tends_to_the_exact_answer(case):
    known = cases.EXACT_CASES[case]()
    method = br.Unrolled(steps=200, step_size=0.3)
    tolerance = 1e-7 if "strong" in case else 1e-5
    check_method(method, known.problem, known.train, known.val, known.expected, tolerance)


@pytest.mark.parametrize("step_size", [0.05, 0.3])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("case", cases.EXACT_CASES)
def test_unrolled_equals_neumann_at_a_stationary_point(case, steps, step_size):
    known = cases.EXACT_CASES[case]()
    unrolled = br.hypergradient(known.problem, known.train, known.val, br.Unrolled(steps, step_size))
    neumann = br.hypergradient(
        known.problem, known.train, known.val, br.Implicit(br.Neumann(terms=steps - 1, scale=step_size))
    )
    for name in neumann.total:
        assert torch.allclose(unrolled.total[name], neumann.total[name], rtol=1e-9, atol=1e-12)
        assert torch.allclose(unrolled.direct[name], neumann.direct[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("last", [None, 3])
def test_unrolled_equals_differences_of_the_training_map(last):
    problem, train, val = cases.network()
    start = {n: w.detach().clone() for n, w in problem.weights.items()}

    def validation_loss_after(steps, weights):
        weights = dict(weights)
        for _ in range(steps):
            with problem.undisturbed() as passes:
                live = {n: w.requires_grad_() for n, w in weights.items()}
                gradient = torch.autograd.grad(passes.train_loss(train, live), list(live.values()))
                weights = {
                    n: (w - 0.4 * g).detach() for (n, w), g in zip(live.items(), gradient, strict=True)
                }
        return weights

    h = br.hypergradient(problem, train, val, br.Unrolled(5, 0.4, last=last))
    before = validation_loss_after(5 - (last or 5), start)
    parameter = problem.hyperparameters["log_decay.0.weight"]
    for index in (0, 7):
        values = []
        for shift in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.view(-1)[index] += shift
            weights = validation_loss_after(last or 5, before)
            with problem.undisturbed() as passes:
                live = {n: w.requires_grad_() for n, w in weights.items()}
                values.append(float(passes.val_loss(val, live).detach()))
            with torch.no_grad():
                parameter.view(-1)[index] -= shift
        assert h.val_loss == pytest.approx(sum(values) / 2, rel=1e-8)
        difference = (values[0] - values[1]) / 2e-5
        assert float(h.total["log_decay.0.weight"].view(-1)[index]) == pytest.approx(
            difference, rel=1e-5, abs=1e-10
        )


def test_truncated_unrolling_of_all_steps_is_unrolling():
    problem, train, val = cases.network()
    full = br.hypergradient(problem, train, val, br.Unrolled(4, 0.3))
    truncated = br.hypergradient(problem, train, val, br.Unrolled(4, 0.3, last=4))
    shorter = br.hypergradient(problem, train, val, br.Unrolled(4, 0.3, last=1))
    assert all(torch.equal(full.total[n], truncated.total[n]) for n in full.total)
    assert any(not torch.allclose(full.total[n], shorter.total[n]) for n in full.total)
    assert shorter.val_loss == full.val_loss


@pytest.mark.parametrize(
    "method",
    [
        br.Implicit(),
        br.Implicit(br.Identity()),
        br.Implicit(br.Neumann(3)),
        br.Implicit(br.Neumann(3, 0.1)),
        br.Implicit(br.ConjugateGradient(3, damping=1.0)),
        br.Implicit(br.ConjugateGradient(3, damping=None), br.FiniteDifference()),
        br.Unrolled(3, 0.1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("hidden", [nn.Identity, lambda: nn.Dropout(0.4), lambda: nn.BatchNorm1d(4)])
def test_no_method_leaves_a_trace(method, hidden):
    problem, train, val = cases.network(hidden())
    problem.model[0].eval()
    for p in problem.weights.values():
        p.grad = torch.ones_like(p)
    check_method(method, problem, train, val)


def test_direct_is_the_direct_term():
    known = cases.ridge()
    h = br.hypergradient(known.problem, known.train, known.val, br.Direct())
    full = br.hypergradient(known.problem, known.train, known.val, br.Implicit(br.Exact()))
    assert all(torch.equal(h.total[n], full.direct[n]) for n in h.total)
    assert float(full.direct["log_decay"].norm()) > 0.01
    assert float(full.indirect["log_decay"].norm()) > 0.001


def test_hyperparameters_of_the_validation_loss_alone_are_named_once():
    model, hyper = nn.Linear(3, 1), nn.ParameterDict({"shift": torch.ones(())})
    fit = lambda m, h, b: m(b).square().mean()  # noqa: E731
    problem = br.Problem(model, hyper, fit, lambda m, h, b: fit(m, h, b) * h["shift"])
    method, batch = br.Implicit(br.Exact(damping=1.0)), torch.randn(8, 3)
    with pytest.warns(br.BestResponseWarning, match="no hyperparameter reaches train_loss"):
        h = br.hypergradient(problem, batch, batch, method)
    br.hypergradient(problem, batch, batch, method)  # an error if it warned again
    assert float(h.total["shift"]) == float(h.direct["shift"]) > 0.0


def test_the_indirect_term_has_one_minus_sign():
    # L_T = (w − λ)²/2 and L_V = w: the weight follows λ, so that dL_V/dλ = +1.
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(2.0))})
    hyper = nn.ParameterDict({"target": nn.Parameter(torch.tensor(2.0))})
    problem = br.Problem(
        model,
        hyper,
        lambda m, h, b: (m["w"] - h["target"]).square() / 2,
        lambda m, h, b: m["w"] + 3 * h["target"],
    )
    for method in (br.Implicit(br.Exact()), br.Implicit(br.Identity()), br.Unrolled(1, 1.0), br.Implicit()):
        h = br.hypergradient(problem, None, None, method)
        assert float(h.indirect["target"]) == pytest.approx(1.0, abs=1e-3)
        assert float(h.direct["target"]) == pytest.approx(3.0)


def test_backward_adds_into_grad():
    known = cases.ridge()
    method = br.Implicit(br.Exact())
    h = br.backward(known.problem, known.train, known.val, method)
    for name, p in known.problem.hyperparameters.items():
        assert torch.equal(p.grad, h.total[name])
    br.backward(known.problem, known.train, known.val, method)
    for name, p in known.problem.hyperparameters.items():
        assert torch.allclose(p.grad, 2 * h.total[name])
    assert all(w.grad is None for w in known.problem.weights.values())


def test_dropout_masks_are_the_same_in_every_pass_and_drawn_from_the_seed():
    problem, train, val = cases.network(nn.Dropout(0.5))
    exact = br.Implicit(br.Exact(damping=0.1))
    differences = br.Implicit(br.Exact(damping=0.1), br.FiniteDifference())
    by_seed = [br.hypergradient(problem, train, val, exact, seed=s).total for s in (1, 2)]
    name = "log_decay.0.weight"
    assert not torch.allclose(by_seed[0][name], by_seed[1][name])
    again = br.hypergradient(problem, train, val, differences, seed=1).total
    assert torch.allclose(by_seed[0][name], again[name], rtol=1e-5, atol=1e-9)
    torch.manual_seed(7)
    one = br.hypergradient(problem, train, val, exact).total[name]
    torch.manual_seed(7)
    assert torch.equal(one, br.hypergradient(problem, train, val, exact).total[name])


def test_the_validation_loss_runs_in_eval_mode_unless_as_is():
    problem, train, val = cases.network(nn.Dropout(0.5))
    method = br.Implicit(br.Identity())
    losses = [br.hypergradient(problem, train, val, method, seed=s).val_loss for s in (1, 2)]
    assert losses[0] == losses[1]
    as_is = br.Problem(problem.model, problem.hyper, problem.train_loss, problem.val_loss, val_mode="as_is")
    losses = [br.hypergradient(as_is, train, val, method, seed=s).val_loss for s in (1, 2)]
    assert losses[0] != losses[1]


def test_hypergradient_works_under_no_grad_and_inference_mode():
    problem, train, val = cases.network()
    method = br.Implicit(br.Exact(damping=0.1))
    plain = br.hypergradient(problem, train, val, method)
    with torch.no_grad():
        one = br.hypergradient(problem, train, val, method)
    with torch.inference_mode():
        other = br.hypergradient(problem, train, val, method)
    for name in plain.total:
        assert torch.equal(plain.total[name], one.total[name])
        assert torch.equal(plain.total[name], other.total[name])


# --- memory and warm starts ---------------------------------------------------------------------


def test_warm_starts_carry_the_solution_on():
    problem, train, val = cases.network()
    method = br.Implicit(br.ConjugateGradient(3, damping=0.5), warm_start=True)
    exact = br.hypergradient(problem, train, val, br.Implicit(br.Exact(damping=0.5)))
    errors, reports = [], []
    for _ in range(8):
        h = br.hypergradient(problem, train, val, method)
        errors.append(float(sum((h.total[n] - exact.total[n]).norm() for n in h.total)))
        reports.append(h.solve)
    assert not reports[0].warm
    assert all(report.warm for report in reports[1:])
    assert errors[-1] < 1e-3 * errors[0]


def test_the_first_warm_started_solve_runs_longer():
    problem, train, val = cases.network()
    method = br.Implicit(br.ConjugateGradient(1, damping=1.0), warm_start=True)
    first = br.hypergradient(problem, train, val, method).solve
    second = br.hypergradient(problem, train, val, method).solve
    assert first.products > 1
    assert first.residual <= 0.1
    assert second.products == 2
    assert second.steps == 1


def test_state_is_kept_by_method_object_forgotten_and_emptied():
    problem, train, val = cases.network()
    method = br.Implicit()
    br.hypergradient(problem, train, val, method)
    state = problem.state(method)
    assert state.solution.keys() == problem.weights.keys()
    assert state.memory["damping"] > 0
    assert problem.state(br.Implicit()).solution is None
    problem.forget(method)
    assert problem.state(method).solution is None
    br.hypergradient(problem, train, val, method)
    problem.model.float()
    assert problem.state(method).solution is None


def test_an_interrupted_call_drops_what_its_curvature_learned():
    class Interrupted(br.ConjugateGradient):
        def iterate(self, system):
            super().iterate(system)
            raise KeyboardInterrupt

    problem, train, val = cases.network()
    method = br.Implicit(Interrupted(max_steps=2), br.FiniteDifference())
    with pytest.raises(KeyboardInterrupt):
        br.hypergradient(problem, train, val, method)
    assert problem.state(method.curvature).memory == {}


def test_a_failed_call_leaves_the_state_as_it_was():
    problem, train, val = cases.network()
    method = br.Implicit()
    br.hypergradient(problem, train, val, method)
    state = problem.state(method)
    with pytest.raises(br.Error):
        br.hypergradient(problem, (train[0] * float("nan"), train[1]), val, method)
    assert problem.state(method).solution is state.solution
    assert problem.state(method).memory == state.memory


def test_a_cold_method_keeps_no_solution():
    problem, train, val = cases.network()
    method = br.Implicit(br.ConjugateGradient(3, damping=1.0))
    h = br.hypergradient(problem, train, val, method)
    again = br.hypergradient(problem, train, val, method)
    assert not again.solve.warm
    assert all(torch.equal(h.total[n], again.total[n]) for n in h.total)


def test_a_warm_method_made_anew_in_a_loop_is_found_out_once():
    problem, train, val = cases.network()
    br.hypergradient(problem, train, val, br.Implicit())
    with pytest.warns(br.BestResponseWarning, match="Make the method once"):
        br.hypergradient(problem, train, val, br.Implicit())
    br.hypergradient(problem, train, val, br.Implicit())


def test_repr_prints_the_resolved_method():
    assert repr(br.Implicit()) == (
        "Implicit(solver=ConjugateGradient(max_steps=4, tolerance=1e-06, damping=None, recycle=0, diagonal=False, "
        "preconditioner=None), curvature=Automatic(), warm_start=True, estimate_error=True)"
    )
    given = br.Implicit(br.ConjugateGradient())
    assert not given.warm_start
    assert type(given.curvature) is br.Hessian


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (br.Neumann(3), r"Implicit\(Neumann"),
        (br.Hessian(), r"Implicit\(curvature=Hessian"),
        (br.Implicit, r"Implicit\(\.\.\.\)"),
        ("neumann", r"Use Implicit\(\)"),
    ],
)
def test_something_else_where_a_method_belongs(method, words):
    problem, train, val = cases.network()
    with pytest.raises(br.Error, match=words) as caught:
        br.hypergradient(problem, train, val, method)
    assert isinstance(caught.value, TypeError)


def test_something_else_where_a_solver_belongs():
    with pytest.raises(br.Error, match="Implicit.solver must be a solver"):
        br.Implicit(br.Unrolled(3, 0.1))
    with pytest.raises(br.Error, match="Implicit.curvature must be a curvature"):
        br.Implicit(br.Neumann(3), br.Neumann(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: br.Unrolled(0, 0.1), "Unrolled.steps"),
        (lambda: br.Unrolled(3, 0.0), "Unrolled.step_size"),
        (lambda: br.Unrolled(3, 0.1, last=4), "Unrolled.last"),
        (lambda: br.FiniteDifference(step=0.0), "FiniteDifference.step"),
    ],
)
def test_arguments_out_of_range(make, words):
    with pytest.raises(br.Error, match=words) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_unrolled_refuses_captured_weights():
    problem, train, val = cases.network()
    captured = problem.model[0].bias
    for spoilt in (
        br.Problem(
            problem.model,
            problem.hyper,
            lambda m, h, b: problem.train_loss(m, h, b) + captured.sum(),
            problem.val_loss,
        ),
        br.Problem(
            problem.model,
            problem.hyper,
            problem.train_loss,
            lambda m, h, b: problem.val_loss(m, h, b) + captured.sum(),
        ),
    ):
        with pytest.raises(br.Error, match=r"loss must read the weights.*used the original \['0\.bias'\]"):
            br.hypergradient(spoilt, train, val, br.Unrolled(2, 0.1))


@pytest.mark.parametrize("method", [br.Implicit(br.Identity()), br.Unrolled(2, 0.1), br.Direct()], ids=repr)
def test_hyperparameters_that_reach_no_loss_are_named(method):
    problem, train, val = cases.network()
    hyper = nn.ModuleDict(
        {"decay": problem.hyper, "extra": nn.ParameterDict({"rate": nn.Parameter(torch.zeros(2))})}
    )
    spoilt = br.Problem(
        problem.model, hyper, lambda m, h, b: problem.train_loss(m, h["decay"], b), problem.val_loss
    )
    with pytest.raises(br.Error, match=r"extra\.rate.*neither.*Unrolled"):
        br.hypergradient(spoilt, train, val, method)
