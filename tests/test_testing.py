"""The checks for classes of your own pass what is right, and fail what is wrong."""

import math

import pytest
import torch
from torch import nn

import bestresponse as br
import cases
from bestresponse.hyperparameters import WeightDecay
from bestresponse.testing import check_curvature, check_hyperparameters, check_solver


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


class Term(nn.Module):
    """Ω = ½ Σ_i exp(λ_i) |w_i|² over the tensors of a model, with its curvature and mixed product."""

    def __init__(self, model):
        super().__init__()
        self.rates = nn.ParameterList(torch.tensor(-1.0) for _ in model.parameters())
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def rate_of(self, model):
        return dict(zip(dict(model.named_parameters()), self.rates, strict=True))

    def forward(self, model):
        self.calls += 1
        self.last = self.calls.clone()
        rates = self.rate_of(model)
        return sum(rates[n].exp() * w.square().sum() / 2 for n, w in model.named_parameters())

    @torch.no_grad()
    def curvature_diagonal(self, model):
        rates = self.rate_of(model)
        return {n: rates[n].exp().expand(w.shape) for n, w in model.named_parameters()}

    @torch.no_grad()
    def mixed_product(self, model, v):
        return {
            f"rates.{i}": self.rates[i].exp() * (w * v[n]).sum()
            for i, (n, w) in enumerate(model.named_parameters())
            if n in v
        }


class MixedAlone(nn.Module):
    def __init__(self, model, factor):
        super().__init__()
        self.term, self.factor = Term(model), factor

    def forward(self, model):
        return self.term(model)

    def mixed_product(self, model, v):
        return {f"term.{n}": self.factor * x for n, x in self.term.mixed_product(model, v).items()}


def test_a_mixed_product_without_a_curvature_is_examined_and_is_not_enough():
    model = nn.Linear(3, 1)
    with pytest.raises(AssertionError, match=r"mixed_product\(\) must be v · ∂²/∂w∂λ"):
        check_hyperparameters(MixedAlone(model, 1.01), model)
    with pytest.raises(AssertionError, match=r"mixed_product\(\) must come with curvature_diagonal\(\)"):
        check_hyperparameters(MixedAlone(model, 1.0), model)


def test_frozen_and_transposed_weights_are_no_obstacle():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    model[0].weight = nn.Parameter(torch.randn(3, 2).T)
    assert not model[0].weight.is_contiguous()
    term = Term(model)
    term.rates[2].requires_grad_(False)
    check_hyperparameters(term, model)
    for power in (1, 2):
        check_hyperparameters(WeightDecay(model, power=power, initial=0.3), model)
    with pytest.raises(br.Error, match="needs a model with a trainable weight"):
        check_hyperparameters(term, model.requires_grad_(False))


def test_transposed_weights_are_no_obstacle_to_the_check_of_a_curvature():
    problem, train, _ = cases.network()
    model = problem.model
    model[0].weight = nn.Parameter(torch.randn(3, 4).T)
    problem = br.Problem(model, problem.hyper, problem.train_loss, problem.val_loss)
    check_curvature(br.Hessian(), problem, train)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (torch.no_grad()(lambda self, model: Term.forward(self, model)), "a tensor without a graph"),
        (lambda self, model: Term.forward(self, model).item(), "as a tensor; got float"),
        (lambda self, model: Term.forward(self, model).expand(2), r"as a scalar; got shape \[2\]"),
    ],
)
def test_a_term_that_has_no_derivative_is_named(forward, message):
    model = nn.Linear(3, 1)
    with pytest.raises(AssertionError, match=message):
        check_hyperparameters(type("Bad", (Term,), {"forward": forward})(model), model)


def test_a_linear_term_has_no_second_derivatives():
    class Linear(Term):
        def forward(self, model):
            return sum(r + w.sum() for r, w in zip(self.rates, model.parameters(), strict=True))

        def curvature_diagonal(self, model):
            return {}

        def mixed_product(self, model, v):
            return {}

    model = nn.Linear(3, 1)
    check_hyperparameters(Linear(model), model)


def test_buffers_are_restored():
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    term = Term(model)
    term.forward = lambda model, inner=term.forward: inner(model) + 0.0 * model(torch.randn(4, 3)).sum()
    before = {n: (b, b.clone()) for m in (term, model) for n, b in m.named_buffers()}
    check_hyperparameters(term, model)
    for n, b in [*term.named_buffers(), *model.named_buffers()]:
        assert b is before[n][0]
        assert torch.equal(b, before[n][1])


def wrong_names(self, model, v):
    return {f"other.{n}": x for n, x in Term.mixed_product(self, model, v).items()}


def wrong_shapes(self, model, v):
    return {n: x.reshape(1) for n, x in Term.mixed_product(self, model, v).items()}


def regression_of(model, term):
    fit = lambda m, h, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    problem = br.Problem(model, term, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = [(torch.randn(20, 3), torch.randn(20, 1)) for _ in range(2)]
    curvature = br.GaussNewton(lambda m, h, b: m(b[0]), lambda o, b: (o - b[1]).square().mean(), term)
    return problem, train, val, curvature


@pytest.mark.parametrize("function", [wrong_names, wrong_shapes])
def test_mixed_products_by_wrong_names_or_of_wrong_shapes_are_named(function):
    model = nn.Linear(3, 1)
    term = type("Bad", (Term,), {"mixed_product": function})(model)
    message = r"mixed_product\(\) of Bad must have the names and shapes of its parameters"
    with pytest.raises(AssertionError, match=message):
        check_hyperparameters(term, model)
    problem, train, val, curvature = regression_of(model, term)
    with pytest.raises(br.Error, match=message):
        br.hypergradient(problem, train, val, br.Implicit(br.Exact(), curvature))


def test_a_curvature_by_wrong_names_is_named_and_not_lost():
    model = nn.Linear(3, 1)
    wrong = lambda self, m: {f"model.{n}": x for n, x in Term.curvature_diagonal(self, m).items()}  # noqa: E731
    problem, train, val, curvature = regression_of(
        model, type("Bad", (Term,), {"curvature_diagonal": wrong})(model)
    )
    preconditioned = br.ConjugateGradient(
        5, preconditioner=br.KFAC(curvature.predict, curvature.loss, curvature.rest)
    )
    for method in (br.Implicit(br.Exact(), curvature), br.Implicit(preconditioned)):
        with pytest.raises(br.Error, match=r"curvature_diagonal\(\) of Bad must name weights of the model"):
            br.hypergradient(problem, train, val, method)


@pytest.mark.parametrize("kind", [Term, lambda model: WeightDecay(model, per="tensor", initial=0.3)])
def test_rates_under_two_names_are_one(kind):
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    term = kind(model)
    if isinstance(term, Term):
        term.rates[1] = term.rates[0]
    else:
        term.log_decay.get_submodule("1").weight = term.log_decay.get_submodule("0").weight
    assert len(list(term.parameters())) == 1
    check_hyperparameters(term, model)
    problem, train, val, known = regression_of(model, term)
    plain = br.GaussNewton(known.predict, known.loss, lambda m, h, b: h(m))
    found = [br.hypergradient(problem, train, val, br.Implicit(br.Exact(), c)).total for c in (known, plain)]
    for n, x in found[1].items():
        torch.testing.assert_close(found[0][n], x, rtol=1e-9, atol=1e-14)


def test_values_to_read_are_checked():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_rate = nn.Parameter(torch.zeros(3))

        def readable(self, name):
            return "rate", lambda x: x.exp().sum()

    with pytest.raises(AssertionError, match="one finite value for each entry"):
        check_hyperparameters(Wrong(), nn.Linear(3, 1))
