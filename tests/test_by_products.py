"""Mixed products as by-products of a solve's products, and the estimate of the error once in ten calls."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse.curvatures.base import Linearisation
from bestresponse.curvatures.by_products import ByProducts
from bestresponse.curvatures.several_batches import MeanLinearisation
from bestresponse.solvers import Report, Solution, Status


class Sources(nn.Module):
    """A weight for each source of data."""

    def __init__(self):
        super().__init__()
        self.logs = nn.Parameter(torch.linspace(-0.5, 0.5, 3, dtype=torch.float64))

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (self.logs.exp() * losses.view(-1, 3)).mean()


class Inputs(nn.Module):
    """A transform of the inputs, in front of the whole model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def loss(self, model, batch):
        x = batch[0] * self.scale
        for _ in range(8):
            x = x.sin().exp()
        return F.cross_entropy(model(x), batch[1])


def problem_of(hyper):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3)).double()

    def train_loss(model, hyper, batch):
        return hyper.loss(model, batch) + 0.1 * sum(w.square().sum() for w in model.parameters())

    def val_loss(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def batch():
        return torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))

    return br.Problem(model, hyper, train_loss, val_loss), batch(), batch()


def linearised(problem, batch):
    with problem.undisturbed(0, None, True) as passes:
        return br.Hessian().linearise(passes, batch)


def test_a_product_gives_the_mixed_product_of_the_same_vector():
    problem, batch, _ = problem_of(Sources())
    system = linearised(problem, batch)
    v = {n: torch.randn_like(w) for n, w in problem.weights.items()}
    product, mixed = system.with_mixed(v)
    assert all(torch.equal(x, product[n]) for n, x in system(v).items())
    torch.testing.assert_close(mixed, system.mixed(v), rtol=1e-13, atol=0.0)


def test_hyperparameters_off_the_path_to_the_weights_have_a_pass_of_their_own():
    problem, batch, _ = problem_of(Inputs())
    assert linearised(problem, batch).with_mixed(dict(problem.weights)) is None


def test_many_hyperparameters_have_a_pass_of_their_own():
    model = nn.Linear(4, 16).double()
    decay = br.hyperparameters.WeightDecay(model, per="weight").double()
    losses = lambda m, h, b: m(b).square().mean() + h(m), lambda m, h, b: m(b).sum()
    system = linearised(br.Problem(model, decay, *losses), torch.ones(3, 4, dtype=torch.float64))
    assert system.with_mixed(dict(model.named_parameters())) is None


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize("damping", [1.0, None])
def test_the_solution_is_the_same_as_by_a_pass_of_its_own(monkeypatch, warm_start, damping):
    found = []
    for shares in (True, False):
        problem, train, val = problem_of(Sources())
        if not shares:
            kind = type(linearised(problem, train))
            monkeypatch.setattr(kind, "with_mixed", Linearisation.with_mixed)
        method = br.Implicit(br.ConjugateGradient(3, damping=damping), warm_start=warm_start)
        found += [[br.hypergradient(problem, train, val, method) for _ in range(3)]]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.total, other.total, rtol=1e-10, atol=1e-14)
        assert one.solve.products == other.solve.products


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("curvature", [br.Hessian(), br.GaussNewton()])
@pytest.mark.parametrize("hyper", [Sources, Inputs])
def test_several_batches_share_their_passes(monkeypatch, hyper, curvature, recompute):
    problem, (x, y), val = problem_of(hyper())
    pieces = [(a, b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    method = br.Implicit(br.ConjugateGradient(3, damping=1.0), curvature, estimate_error=False)
    weighed = br.Batches(pieces, weights=[1.0, 2.0, 3.0, 4.0], recompute=recompute)
    expected = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(MeanLinearisation, "with_mixed", Linearisation.with_mixed)
        calls, own = [], MeanLinearisation.mixed
        with monkeypatch.context() as patch:
            patch.setattr(MeanLinearisation, "mixed", lambda *g, own=own: calls.append(1) or own(*g))  # noqa: B023
            expected.append(br.hypergradient(problem, weighed, val, method))
        assert len(calls) == (0 if shares and hyper is Sources else 1)
    torch.testing.assert_close(expected[0].total, expected[1].total, rtol=1e-12, atol=1e-14)


def test_of_several_batches_one_may_not_share_its_pass():
    """Whose outputs depend on a hyperparameter."""
    problem, batch, val = problem_of(Sources())
    own = problem.train_loss
    second = tuple(x.flip(0) for x in batch)

    def scaled(model, hyper, given):
        x, y = given
        return own(model, hyper, (x * hyper.logs.exp().mean(), y) if given is second else given)

    mixed = br.Problem(problem.model, problem.hyper, scaled, problem.val_loss)
    method = br.Implicit(br.ConjugateGradient(3, damping=1.0), br.GaussNewton())
    found = [
        br.hypergradient(mixed, br.Batches([batch, second], recompute=recompute), val, method).total
        for recompute in (False, True)
    ]
    whole = lambda m, h, b: (scaled(m, h, batch) + scaled(m, h, second)) / 2  # noqa: E731
    one = br.Problem(problem.model, problem.hyper, whole, problem.val_loss)
    expected = br.hypergradient(one, batch, val, method).total
    for total in found:
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-14)


def test_no_pass_is_made_for_the_solution_alone(monkeypatch):
    problem, train, val = problem_of(Sources())
    method = br.Implicit()
    br.hypergradient(problem, train, val, method)
    kind, calls = type(linearised(problem, train)), []
    monkeypatch.setattr(kind, "mixed", lambda *_: calls.append(1))
    h = br.hypergradient(problem, train, val, method)
    assert not calls
    assert h.solve.warm


def test_the_error_of_warm_started_calls_is_estimated_once_in_ten():
    problem, train, val = problem_of(Sources())
    method, cold = br.Implicit(), br.Implicit(br.ConjugateGradient(2))
    known = [br.hypergradient(problem, train, val, method).solve.hypergradient_error for _ in range(12)]
    assert [i for i, error in enumerate(known) if error is not None] == [0, 10]
    assert all(br.hypergradient(problem, train, val, cold).solve.hypergradient_error for _ in range(2))


def predict(model, hyper, batch):
    return model(batch[0]), hyper.logs


def weighed(outputs, batch):
    losses = F.cross_entropy(outputs[0], batch[1], reduction="none")
    return (outputs[1].exp() * losses.view(-1, 3)).mean()


def decay(model, hyper, batch):
    return 0.1 * model[0].weight.square().sum()


def split_system(predict, loss, hyper=None):
    """The Gauss-Newton and Hessian linearisations of the split loss, and a vector."""
    problem, batch, _ = problem_of(hyper or Sources())
    curvature = br.GaussNewton(predict, lambda o, b: loss(o, b), decay)
    with problem.undisturbed(0, None, True) as passes:
        problem.train_loss = lambda m, h, b: loss(predict(m, h, b), b) + decay(m, h, b)
        systems = curvature.linearise(passes, batch), br.Hessian().linearise(passes, batch)
    return *systems, {n: torch.randn_like(w) for n, w in problem.weights.items()}


def test_gauss_newton_has_the_mixed_term_in_the_rows_of_the_output_hessian():
    system, hessian, v = split_system(predict, weighed)
    product, mixed = system.with_mixed(v)
    torch.testing.assert_close(product, system(v), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(mixed, hessian.mixed(v, False), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(system.mixed(v), hessian.mixed(v), rtol=1e-12, atol=0.0)


def captured(hyper):
    """A loss that also reads the hyperparameters past its outputs."""
    return lambda outputs, batch: weighed(outputs, batch) * hyper.logs.square().sum()


def test_gauss_newton_of_outputs_that_depend_on_both_takes_the_graph():
    hyper = Sources()
    for name, other_predict, loss in (
        ("outputs", lambda m, h, b: (m(b[0]) * h.logs, h.logs), weighed),
        ("loss", predict, captured(hyper)),
    ):
        system, hessian, v = split_system(other_predict, loss, hyper)
        assert system.with_mixed(v) is None, name
        torch.testing.assert_close(system.mixed(v), hessian.mixed(v), rtol=1e-12, atol=0.0)


def test_long_solves_keep_no_more_than_a_vector_of_weights():
    problem, batch, _ = problem_of(Sources())
    v = {n: torch.ones_like(w) for n, w in problem.weights.items()}
    products, size = ByProducts(linearised(problem, batch)), sum(w.numel() for w in v.values())
    number = size // 3 + 2  # each product keeps three numbers
    for _ in range(number):
        products(v)
    solution = Solution(v, Report(Status.STEPS_USED, 0, 0, None), combination={0: 1.0, 1: -2.0})
    assert products.of(solution) is not None
    assert products.of(replace(solution, combination={number - 1: 1.0})) is None
