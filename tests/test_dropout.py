import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import bestresponse as br
from bestresponse.hyperparameters import ConcreteDropout, DropConnect
from bestresponse.testing import check_curvature, check_method


def logit(p):
    return math.log(p / (1 - p))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_masks_are_nearly_those_of_dropout(rate):
    """Nearly zero or 1 / (1 − p), the share of zeros p, and the mean of the kept values nearly one."""
    y = ConcreteDropout(initial=rate, temperature=0.02)(torch.ones(200, 500)).detach()
    kept = y * (1 - rate)
    assert float((kept < 0.5).double().mean()) == pytest.approx(rate, abs=0.01)
    assert float(((kept < 0.01) | (kept > 0.99)).double().mean()) > 0.9
    assert float(y.mean()) == pytest.approx(1.0, abs=0.03)


def test_a_rate_for_each_unit_and_one_mask_over_time():
    drop = ConcreteDropout(4, shared=(0,))
    with torch.no_grad():
        drop.logit.copy_(torch.tensor([logit(p) for p in (0.01, 0.3, 0.6, 0.9)]))
    assert torch.allclose(drop.rates(), torch.tensor([0.01, 0.3, 0.6, 0.9]))
    y = drop(torch.ones(7, 3000, 4))
    assert torch.equal(y, y[:1].expand_as(y))
    shares = (y[0] * (1 - drop.rates()) < 0.5).double().mean(0)
    assert torch.allclose(shares, drop.rates(), atol=0.03)
    assert not torch.equal(y[0, 0], y[0, 1])
    over_features = ConcreteDropout(shared=(-1,))(torch.ones(50, 6))  # rows of an embedding
    assert torch.equal(over_features, over_features[:, :1].expand(-1, 6))
    assert over_features[:, 0].std() > 0.3


def test_eval_mode_leaves_the_tensor_and_the_random_state():
    drop, x = ConcreteDropout().eval(), torch.randn(3, 4)
    before = torch.get_rng_state()
    assert drop(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_derivative_in_the_rate_is_that_of_the_same_masks():
    drop, x = ConcreteDropout((5,)), torch.randn(8, 5)

    def value():
        torch.manual_seed(3)
        return (drop(x).square() * torch.arange(5)).sum()

    (slope,) = torch.autograd.grad(value(), drop.logit)
    for i in range(1, 5):
        with torch.no_grad():
            drop.logit[i] += 1e-5
            above = float(value())
            drop.logit[i] -= 2e-5
            below = float(value())
            drop.logit[i] += 1e-5
        assert float(slope[i]) == pytest.approx((above - below) / 2e-5, rel=1e-6)


class Network(nn.Module):
    """A network with dropout of its units and of a weight, whose rates are in one submodule."""

    def __init__(self, per_weight):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.rates = nn.ModuleDict(
            {
                "units": ConcreteDropout((4,), 0.3),
                "weight": DropConnect(self.second.weight.shape if per_weight else (), 0.2),
            }
        )

    def forward(self, x):
        hidden = self.rates["units"](self.first(x).tanh())
        return F.linear(hidden, self.rates["weight"](self.second.weight), self.second.bias)


def problem_of(per_weight=True):
    model = Network(per_weight)

    def train_loss(model, rates, batch):
        decay = 0.05 * sum(w.square().sum() for w in (model.first.weight, model.second.weight))
        return F.cross_entropy(model(batch[0]), batch[1]) + decay

    def val_loss(model, rates, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    batches = [(torch.randn(n, 3), torch.randint(2, (n,))) for n in (12, 10)]
    return br.Problem(model, model.rates, train_loss, val_loss), *batches


@pytest.mark.parametrize("per_weight", [True, False])
def test_rates_are_hyperparameters(per_weight):
    problem, train, val = problem_of(per_weight)
    assert problem.hyperparameters.keys() == {"units.logit", "weight.logit"}
    check_curvature(br.Hessian(), problem, train)
    check_method(br.Implicit(br.ConjugateGradient(5, damping=1.0)), problem, train, val)
    h = br.hypergradient(problem, train, val, br.Unrolled(3, 0.2), seed=4)
    parameter = problem.hyperparameters["units.logit"].detach()
    values = []
    for shift in (1e-5, -2e-5):
        parameter[1] += shift
        values.append(br.hypergradient(problem, train, val, br.Unrolled(3, 0.2), seed=4).val_loss)
    parameter[1] += 1e-5
    assert float(h.total["units.logit"][1]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates, self.linear = ConcreteDropout((8,), 0.3), nn.Linear(8, 1, bias=False)

    def forward(self, x):
        return self.linear(self.rates(x))[:, 0]


def test_rates_find_the_features_that_tell_nothing():
    """Of eight features, a rate for each, three tell of the target: their rates fall, and those of the others rise."""
    truth = torch.tensor([2.0] * 3 + [0.0] * 5)

    def examples(n):
        x = torch.randn(n, 8)
        return x, x @ truth + torch.randn(n)

    # Each training example twenty times, with a mask for each.
    train, val = [x.repeat_interleave(20, 0) for x in examples(20)], examples(200)
    model = Regression()
    loss = lambda model, rates, batch: (model(batch[0]) - batch[1]).square().mean()  # noqa: E731
    problem = br.Problem(model, model.rates, loss, loss)
    weights = torch.optim.Adam(problem.weights.values(), 0.05)
    tuner = br.Tuner(problem, weights, torch.optim.Adam(model.rates.parameters(), 0.1), weight_steps=5)
    tuner.fit([train], [val], 80)
    rates = model.rates.rates()
    assert float(rates[:3].max()) < 0.2
    assert float(rates[3:].min()) > 0.3


def test_rates_keep_their_bounds():
    drop = ConcreteDropout((3,), minimum=0.01, maximum=0.9)
    with torch.no_grad():
        drop.logit.copy_(torch.tensor([-100.0, 0.2, 100.0]))
    drop.project_()
    assert torch.allclose(drop.rates(), torch.tensor([0.01, torch.tensor(0.2).sigmoid(), 0.9]))
    assert drop.ranges() == {"logit": pytest.approx((logit(0.01), logit(0.9)))}


def test_dropconnect_is_a_parametrization():
    """Registered on any layer's weight: another mask in each call, one in eval mode, and second derivatives."""
    layer = nn.Linear(3, 2)
    parametrize.register_parametrization(layer, "weight", DropConnect())
    x = torch.randn(4, 3)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    weight = layer.parametrizations.weight.original
    assert torch.equal(layer(x), F.linear(x, weight, layer.bias))
    layer.train()
    rates = layer.parametrizations.weight[0]

    def loss(model, rates, batch):
        return model(batch).square().mean() + 0.1 * model.bias.square().sum()

    problem = br.Problem(layer, rates, loss, loss)
    assert set(problem.weights) == {"bias", "parametrizations.weight.original"}
    check_curvature(br.Hessian(), problem, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_finite_in_every_precision(dtype):
    drop = ConcreteDropout(initial=0.95, minimum=1e-6)
    x = torch.ones(1000, 1000, dtype=dtype)
    y = drop(x)
    assert y.dtype == dtype
    (slope,) = torch.autograd.grad(y.float().sum(), drop.logit)
    assert bool(y.isfinite().all())
    assert bool(slope.isfinite())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConcreteDropout(initial=1.0), "0 < minimum ≤ initial ≤ maximum < 1"),
        (lambda: ConcreteDropout(initial=0.5, minimum=0.6), "0 < minimum ≤ initial"),
        (lambda: DropConnect(temperature=0.0), "DropConnect.temperature must be positive"),
        (lambda: ConcreteDropout(initial="half"), "ConcreteDropout.initial must be a number"),
        (lambda: ConcreteDropout((3,))(torch.ones(2, 4)), r"rates of shape \[3\].*got a tensor of shape \[2, 4\]"),
        (lambda: ConcreteDropout((2, 4))(torch.ones(4)), r"rates of shape \[2, 4\]"),
        (lambda: ConcreteDropout(shared=(2,))(torch.ones(2, 4)), r"shares masks along \[2\]"),
    ],
)  # fmt: skip
def test_arguments(make, message):
    with pytest.raises(br.Error, match=message):
        make()
