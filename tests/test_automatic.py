"""`Implicit()`: the Hessian where it has no negative curvature, else Gauss-Newton."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases

pytestmark = pytest.mark.usefixtures("verifying")


def classes(n=24):
    return torch.randn(n, 5), torch.randint(3, (n,))


def problem_of(loss=F.cross_entropy, hidden=nn.Tanh, seed=0, decay=1e-3):
    """An untrained network with a decay for each weight; its Hessian is indefinite."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), hidden(), nn.Linear(8, 3))
    hyper = br.hyperparameters.WeightDecay(model, per="weight", initial=decay)
    fit = lambda m, h, b: loss(m(b[0]), b[1])  # noqa: E731
    return br.Problem(model, hyper, lambda m, h, b: fit(m, h, b) + h(m), fit)


def by_hand(outputs, targets):
    return -outputs.log_softmax(1)[torch.arange(len(targets)), targets].mean()


def totals(h):
    return torch.cat([x.flatten() for x in h.total.values()])


def calls(problem, batches, method):
    """A hypergradient after each of some steps of the weights."""
    found = []
    for number, batch in enumerate(batches):
        cases.train(problem, batch, torch.optim.SGD(problem.weights.values(), 0.05), 3)
        found.append(br.hypergradient(problem, batch, batch, method, seed=number))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_it_is_gauss_newton_from_the_first_negative_curvature_on(seed):
    found, expected, spent = [], [], br.Implicit(curvature=br.Hessian())
    for method, into in ((br.Implicit(), found), (br.Implicit(curvature=br.GaussNewton()), expected)):
        problem = problem_of(seed=seed)
        into += calls(problem, [classes() for _ in range(4)], method)
    for h, other in zip(found, expected, strict=True):
        assert torch.equal(totals(h), totals(other))
        assert h.verification == "verified"
        assert "Gauss-Newton, since the Hessian had negative curvature" in h.solve.detail
        assert "outputs found at cross_entropy" in h.solve.detail
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first,) = calls(problem_of(seed=seed), [classes()], spent)
    assert first.solve.indefinite
    counts = [h.solve.products for h in expected]
    assert [h.solve.products for h in found] == [counts[0] + first.solve.products, *counts[1:]]


@pytest.mark.parametrize("make", [cases.softmax, cases.ridge])
@pytest.mark.parametrize("scale", [-2.0, 0.5])
def test_it_is_the_hessian_at_a_minimum(make, scale):
    case = make(scale)
    method = br.Implicit()
    for _ in range(12):
        h = br.hypergradient(case.problem, case.train, case.val, method)
    plain = br.Implicit(curvature=br.Hessian())
    for _ in range(12):
        other = br.hypergradient(case.problem, case.train, case.val, plain)
    for name, expected in case.expected.items():
        torch.testing.assert_close(h.total[name], expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(h.total[name], other.total[name])
    assert not case.problem.state(method.curvature).memory


def test_a_network_at_a_strict_minimum_keeps_the_hessian():
    """Its hypergradient is that of the exact Hessian, which Gauss-Newton is not."""
    problem, batch = problem_of(decay=0.02), classes()
    cases.train(problem, batch, torch.optim.Adam(problem.weights.values(), 0.01), 3000)
    exact = totals(br.hypergradient(problem, batch, batch, br.Implicit(br.Exact())))
    rough = totals(br.hypergradient(problem, batch, batch, br.Implicit(br.Exact(), br.GaussNewton())))
    method = br.Implicit()
    for _ in range(30):
        h = br.hypergradient(problem, batch, batch, method)
    assert not h.solve.indefinite
    assert (totals(h) - exact).norm() < 0.05 * exact.norm()
    assert (rough - exact).norm() > 0.1 * exact.norm()


def test_the_hessian_stays_where_no_loss_function_is_called():
    batches = [classes() for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in (br.Implicit(), br.Implicit(curvature=br.Hessian())):
            problem = problem_of(by_hand)
            found = calls(problem, batches, method)
            if type(method.curvature) is not br.Hessian:
                own = found
                assert problem.state(method.curvature).memory == {"gauss_newton": False}
    assert own[0].solve.indefinite
    for h, other in zip(own, found, strict=True):
        assert torch.equal(totals(h), totals(other))
        assert h.solve.products == other.solve.products
        assert "Gauss-Newton" not in h.solve.detail


def test_a_batch_without_a_loss_function_has_its_hessian():
    sometimes = lambda o, y: F.cross_entropy(o, y) if len(y) == 24 else by_hand(o, y)  # noqa: E731
    problem, method = problem_of(sometimes), br.Implicit()
    _, h, after = calls(problem, [classes(), classes(20), classes()], method)
    assert "the Hessian of this batch: GaussNewton() looks for" in h.solve.detail
    assert after.solve.detail.startswith("Gauss-Newton, since")


def test_several_batches_one_at_a_time():
    pieces = [classes() for _ in range(3)]
    found = []
    for recompute in (False, True):
        batches = br.Batches(pieces, recompute=recompute)
        found.append(br.hypergradient(problem_of(), batches, pieces[0], br.Implicit()))
    torch.testing.assert_close(totals(found[0]), totals(found[1]))
    assert all("Gauss-Newton" in h.solve.detail for h in found)


def test_the_choice_is_a_part_of_the_state(tmp_path):
    def tuner():
        problem = problem_of()
        hyper = torch.optim.Adam(problem.hyperparameters.values(), 0.1)
        return br.Tuner(problem, torch.optim.SGD(problem.weights.values(), 0.1), hyper, br.Implicit())

    torch.manual_seed(1)
    batch = classes()
    whole, first, second = tuner(), tuner(), tuner()
    whole.fit([batch], [batch], 6)
    first.fit([batch], [batch], 3)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.fit([batch], [batch], 3)
    for w, again in zip(
        whole.problem.hyperparameters.values(), second.problem.hyperparameters.values(), strict=True
    ):
        assert torch.equal(w, again)
    curvature = second.method.curvature
    assert second.problem.state(curvature).memory == {"gauss_newton": True}
    second.problem.forget(second.method)
    assert not second.problem.state(curvature).memory


def test_a_failed_call_chooses_nothing():
    problem, method, batch = problem_of(), br.Implicit(), classes()
    count = 0

    def fails(m, h, b):
        nonlocal count
        count += 1
        if count == 4:  # after the choice
            raise ValueError("stop")
        return F.cross_entropy(m(b[0]), b[1]) + h(m)

    problem.train_loss = fails
    with pytest.raises(ValueError, match="stop"):
        br.hypergradient(problem, batch, batch, method)
    assert not problem.state(method.curvature).memory
    assert problem.state(method).solution is None


def test_both_halves_share_the_choice():
    problem, batch = problem_of(), classes()
    method = br.Halves(br.Implicit())
    h = br.hypergradient(problem, batch, batch, method)
    assert "Gauss-Newton" in h.solve.detail
    assert problem.state(method.method.curvature).memory == {"gauss_newton": True}


@pytest.mark.parametrize("batched", [True, False])
def test_folds_that_run_batched_keep_the_hessian(batched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    hyper = br.hyperparameters.WeightDecay(model, initial=1e-3)
    fit = lambda m, h, b: F.cross_entropy(m(b[0]), b[1])  # noqa: E731
    folds = br.Folds(model, hyper, lambda m, h, b: fit(m, h, b) + h(m), fit, folds=2, batched=batched)
    pair = (classes(), classes())
    method = br.Implicit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h = br.hypergradient(folds, pair, pair, method)
    assert ("Gauss-Newton" in h.solve.detail) is not batched


def test_a_solver_that_is_given_has_the_hessian():
    assert type(br.Implicit(br.Neumann(3)).curvature) is br.Hessian
    assert type(br.Implicit().curvature) is br.curvatures.Automatic
    assert type(br.Implicit(warm_start=False).curvature) is br.curvatures.Automatic
