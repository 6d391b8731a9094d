"""The checks for classes of your own pass what is right, and fail what is wrong."""

import math

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse.hyperparameters import WeightDecay
from bestresponse.testing import check_hyperparameters, check_solver


@pytest.mark.parametrize("power", [1, 1.5, 2, 3])
@pytest.mark.parametrize("per", ["global", "tensor", "weight"])
def test_decays_are_right(per, power):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    decay = WeightDecay(model, per=per, power=power, initial=0.3)
    before = {n: p.clone() for n, p in [*decay.named_parameters(), *model.named_parameters()]}
    check_hyperparameters(decay, model)
    for n, p in [*decay.named_parameters(), *model.named_parameters()]:
        assert torch.equal(p, before[n])


def test_dropout_rates_are_right():
    drop = br.hyperparameters.ConcreteDropout(3)
    check_hyperparameters(drop, nn.Linear(3, 1))


def wrong_curvature(decay, model):
    return {n: 1.01 * d for n, d in WeightDecay.curvature_diagonal(decay, model).items()}


def wrong_mixed(decay, model, v):
    return {n: -x for n, x in WeightDecay.mixed_product(decay, model, v).items()}


def wrong_rates(decay, model):
    return {n: 2.0 * r for n, r in WeightDecay.rates_at_zero(decay, model).items()}


def wrong_bounds(decay):
    for p in decay.parameters():
        p.mul_(0.9)


WRONG = {
    "curvature_diagonal": (2, wrong_curvature),
    "mixed_product": (2, wrong_mixed),
    "rates_at_zero": (1, wrong_rates),
    "project_": (2, wrong_bounds),
    "ranges": (2, lambda decay: {"log_decay": (1.0, 0.0)}),
    "ranges, name": (2, lambda decay: {"other": (0.0, 1.0)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    power, function = WRONG[name]
    method = name.split(",")[0]
    kind = type("Wrong", (WeightDecay,), {method: torch.no_grad()(function)})
    model = nn.Linear(3, 1)
    with pytest.raises(AssertionError, match=method):
        check_hyperparameters(kind(model, power=power, per="global", initial=0.3), model)


def test_a_term_with_mixed_derivatives_has_no_curvature_diagonal():
    class Coupled(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(0.3))

        def forward(self, model):
            return self.rate * sum(w.sum() for w in model.parameters()) ** 2 / 2

        def curvature_diagonal(self, model):
            return {n: self.rate.detach().expand(w.shape) for n, w in model.named_parameters()}

    with pytest.raises(AssertionError, match="whole Hessian"):
        check_hyperparameters(Coupled(), nn.Linear(3, 1))


def test_a_solver_with_a_fixed_step_can_be_checked_at_its_scale():
    solver = br.Neumann(200, scale=0.5)
    check_solver(solver, scales=())
    with pytest.raises(AssertionError, match="times 300"):
        check_solver(solver)


def test_a_solver_with_a_wrong_answer_is_named():
    class Half(br.Exact):
        def iterate(self, system):
            solution = super().iterate(system)
            solution.x.update({n: x / 2 for n, x in solution.x.items()})
            return solution

    with pytest.raises(AssertionError, match="residual"):
        check_solver(Half(), scales=())


def test_a_solver_declares_what_it_wants():
    kfac = br.KFAC(lambda m, h, b: m(b), lambda o, b: o.mean())
    assert br.ConjugateGradient(diagonal=True).wants.diagonal
    assert br.MINRES(preconditioner=kfac).wants.preconditioner is kfac
    assert br.ConjugateGradient(preconditioner=lambda r: r).wants.preconditioner is None
    assert br.Neumann(3, fresh_batches=True).wants.start == "refused"
    assert br.solvers.SOBA(fresh_batches=True).wants == br.solvers.Wants(fresh_batches=True, start="required")
    assert br.Exact().wants == br.solvers.Wants()
    assert math.isclose(br.ConjugateGradient(tolerance=0.1).relative_residual, 0.1)


def test_a_subclass_with_another_value_has_no_known_curvature():
    class Thrice(WeightDecay):
        def forward(self, model):
            return 3.0 * super().forward(model)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    decay = Thrice(model, initial=0.1)
    fit = lambda m, h, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = [(torch.randn(20, 4), torch.randn(20, 1)) for _ in range(2)]
    predict, loss = lambda m, h, b: m(b[0]), lambda o, b: (o - b[1]).square().mean()
    results = [
        br.hypergradient(problem, train, val, br.Implicit(br.Exact(), kind(predict, loss, rest)))
        for kind in (br.GaussNewton, br.KFAC)
        for rest in (decay, lambda m, h, b: h(m))
    ]
    for one, other in (results[:2], results[2:]):
        for name, x in other.total.items():
            torch.testing.assert_close(one.total[name], x, rtol=1e-9, atol=1e-14)
