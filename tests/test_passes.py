"""Passes leave no trace: what modules keep is put back, each starts from the same, and what moves weights is named."""

import random
from collections import deque

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse.hyperparameters import WeightDecay
from bestresponse.passes import module_state

fit = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
regularised = lambda m, h, b: fit(m, h, b) + h(m)  # noqa: E731
METHODS = {
    "implicit": br.Implicit(br.Exact()),
    "differences": br.Implicit(br.Exact(), br.FiniteDifference()),
    "Gauss-Newton": br.Implicit(
        br.Exact(), br.GaussNewton(lambda m, h, b: m(b[0]), lambda o, b: F.mse_loss(o, b[1]))
    ),
    "unrolled": br.Unrolled(2, 0.1),
    "forward": br.Forward(2, 0.1),
    "penalty": br.Penalty(2, 0.1),
    "SAMA": br.SAMA(rule=br.rules.SGD()),
}


def problem_of(model, train_loss=regularised, val_loss=fit, **more):
    return br.Problem(model, WeightDecay(model, initial=0.3, per="tensor"), train_loss, val_loss, **more)


def batch():
    return torch.randn(12, 3), torch.randn(12, 2)


class Moving(nn.Module):
    """All kinds of state that a forward pass moves, with what it drew and counted in the output."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
        self.calls, self.running, self.queue = 0, torch.zeros(2), deque([0.0], maxlen=3)
        self.seen, self.named, self.rows = [], {"count": 0}, [torch.zeros(2)]
        self.torch_draws = torch.Generator().manual_seed(1)
        self.numpy_draws, self.python_draws = numpy.random.default_rng(2), random.Random(3)
        self.counts = numpy.zeros(2)

    def forward(self, x):
        self.calls += 1
        self.key.weight.data = self.key.weight.data * 0.9 + 0.1
        with torch.no_grad():
            self.key.bias.lerp_(torch.ones(2), 0.1)
            self.running += 1.0
            self.rows[0] += 1.0
        self.seen.append(self.calls)
        self.named["count"] += 1
        self.queue.append(float(self.calls))
        self.counts += 1.0
        self.late = self.calls
        keep = torch.rand(x.shape, generator=self.torch_draws, dtype=x.dtype) < 0.7
        scale = self.numpy_draws.random() + self.python_draws.random() + 0.1 * len(self.seen) * self.calls
        scale += sum(self.queue) + self.named["count"] + float(self.running.sum() + self.rows[0].sum())
        return self.query(x * keep) * (scale + float(self.counts.sum())) / 10 + self.key(x).detach()

    def state(self):
        tensors = [
            *(p.detach().clone() for p in self.parameters()),
            self.running.clone(),
            self.rows[0].clone(),
        ]
        plain = self.calls, list(self.queue), list(self.seen), dict(self.named), hasattr(self, "late")
        draws = self.numpy_draws.bit_generator.state, self.python_draws.getstate()
        return [*tensors, self.torch_draws.get_state(), torch.as_tensor(self.counts)], (plain, draws)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_a_module_keeps_is_put_back_and_each_pass_starts_from_it(method):
    model = Moving()
    problem, b = problem_of(model), batch()
    before, objects = model.state(), (model.running, model.rows, model.key.weight)
    first = br.hypergradient(problem, b, b, method, weight_optimizer=torch.optim.SGD(model.parameters(), 0.1))
    after = model.state()
    assert all(torch.equal(x, y) for x, y in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert all(x is y for x, y in zip(objects, (model.running, model.rows, model.key.weight), strict=True))
    problem.forget(method)
    again = br.hypergradient(problem, b, b, method, weight_optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert all(torch.equal(x, again.total[n]) for n, x in first.total.items())
    after = model.state()
    assert all(torch.equal(x, y) for x, y in zip(before[0], after[0], strict=True))
    # Where each pass began somewhere else, a difference of two passes would be far off.
    if method is METHODS["differences"]:
        problem.forget(method)
        exact = br.hypergradient(problem, b, b, METHODS["implicit"])
        assert all(torch.allclose(first.total[n], x, rtol=1e-5, atol=1e-7) for n, x in exact.total.items())


def test_what_a_loss_freezes_is_trainable_again():
    model, b = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), batch()

    def last_alone(m, h, b):
        m[0].requires_grad_(False)
        return fit(m, h, b)

    frozen, plain = (
        br.hypergradient(problem_of(model, val_loss=v), b, b, br.Implicit(br.Exact()))
        for v in (last_alone, fit)
    )
    assert all(p.requires_grad for p in model.parameters())
    # The first layer takes part in the training loss, and so in the response.
    assert float(frozen.total["log_decay.0.weight"]) != 0
    assert frozen.norm != plain.norm


def test_state_after_an_error_is_that_before():
    model = Moving()
    before = model.state()

    def failing(m, h, b):
        m(b[0])
        raise KeyError("stop")

    with pytest.raises(KeyError):
        br.hypergradient(problem_of(model, val_loss=failing), batch(), batch(), br.Implicit())
    after = model.state()
    assert all(torch.equal(x, y) for x, y in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]


def test_state_that_is_too_large_is_named_once(monkeypatch):
    monkeypatch.setattr(module_state, "LARGEST", 20)
    model = Moving()
    problem, b = problem_of(model), batch()
    with pytest.warns(br.BestResponseWarning, match=r"model\.key\.weight.*not restored"):
        br.hypergradient(problem, b, b, br.Implicit(br.Exact()))
    br.hypergradient(problem, b, b, br.Implicit(br.Exact()))


class Clamped(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.inside = nn.Linear(3, 2)
        self.edit = edit

    def forward(self, x):
        self.edit(self.inside.weight)
        return self.inside(x)


@torch.no_grad()
def clamp(w):
    w.clamp_(-0.1, 0.1)


def clamp_data(w):
    w.data.clamp_(-0.1, 0.1)


def replace_data(w):
    w.data = w.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("edit", [clamp, clamp_data, replace_data])
def test_a_loss_that_edits_weights_is_named_and_they_are_put_back(edit, method):
    model, b = Clamped(edit), batch()
    nn.init.constant_(model.inside.weight, 0.5)
    problem = problem_of(model)
    with pytest.raises(br.Error, match=r"must leave weights.*inside\.weight"):
        br.hypergradient(problem, b, b, method)
    assert torch.equal(model.inside.weight, torch.full((2, 3), 0.5))


def test_edits_that_begin_later_and_edits_of_hyperparameters_are_named():
    model, b = Clamped(clamp), batch()
    nn.init.constant_(model.inside.weight, 0.05)
    problem = problem_of(model)
    br.hypergradient(problem, b, b, br.Implicit(br.Exact()))  # an edit that changes nothing
    nn.init.constant_(model.inside.weight, 0.5)
    with pytest.raises(br.Error, match=r"inside\.weight"):
        br.hypergradient(problem, b, b, br.Implicit(br.Exact()))
    assert torch.equal(model.inside.weight, torch.full((2, 3), 0.5))

    def bounded(m, h, b):
        next(h.parameters()).data.clamp_(max=-2.0)
        return regularised(m, h, b)

    problem = problem_of(nn.Linear(3, 2), bounded)
    with pytest.raises(br.Error, match=r"train_loss must leave.*hyper\.log_decay"):
        br.hypergradient(problem, b, b, br.Implicit(br.Exact()))
    assert float(next(problem.hyper.parameters()).detach().max()) > -2.0


@pytest.mark.parametrize("kind", [br.GaussNewton, br.KFAC])
def test_an_edit_in_predict_alone_is_named(kind):
    model, b = nn.Linear(3, 2), batch()

    def predict(m, h, b):
        m.weight.data.mul_(1.5)
        return m(b[0])

    kept = model.weight.detach().clone()
    curvature = kind(predict, lambda o, b: F.mse_loss(o, b[1]), lambda m, h, b: h(m))
    with pytest.raises(br.Error, match=r"predict.*must leave weights.*weight.*have been restored"):
        br.hypergradient(problem_of(model), b, b, br.Implicit(br.ConjugateGradient(3), curvature))
    assert torch.equal(model.weight, kept)


def test_an_edit_in_a_backward_pass_is_named():
    model, b = nn.Linear(3, 2), batch()

    def edit(gradient):
        model.weight.data.mul_(1.5)

    def edited(m, h, b):
        outputs = m(b[0])
        outputs.register_hook(edit)
        return F.mse_loss(outputs, b[1])

    with pytest.raises(br.Error, match=r"backward pass must leave weights.*of weight"):
        br.hypergradient(problem_of(model, val_loss=edited), b, b, br.Implicit(br.Exact()))


def test_gradients_that_a_loss_fills_are_put_back():
    model, b = nn.Linear(3, 2), batch()

    def penalised(m, h, b):
        x = b[0].clone().requires_grad_()
        m(x).square().sum().backward(create_graph=True)
        return regularised(m, h, b) + 0.1 * x.grad.square().sum()

    def plain(m, h, b):
        x = b[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return regularised(m, h, b) + 0.1 * g.square().sum()

    model.weight.grad = kept = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="create_graph=True"):
        one = br.hypergradient(problem_of(model, penalised), b, b, br.Implicit(br.Exact()))
    other = br.hypergradient(problem_of(model, plain), b, b, br.Implicit(br.Exact()))
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 3))
    assert model.bias.grad is None
    assert all(torch.allclose(one.total[n], x) for n, x in other.total.items())


class Reversible(torch.autograd.Function):
    """A block that runs its inside again in the backward pass, and fills the gradients of its weights."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.inside = inside
        ctx.save_for_backward(x)
        return inside(x).detach()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.inside(x), gradient)
        return x.grad, None


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(Reversible.apply(self.first(x), self.block))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_block_that_fills_gradients_in_its_backward_pass_is_named(method):
    problem, b = problem_of(Blocks()), batch()
    problem.model.block.weight.grad = kept = torch.ones(3, 3)
    with pytest.raises(br.Error, match=r"block\.weight.*reversible|without torch.utils.checkpoint"):
        br.hypergradient(problem, b, b, method)
    assert problem.model.block.weight.grad is kept
    assert torch.equal(kept, torch.ones(3, 3))


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return 2.0 * x.tanh()
        return x * torch.bernoulli(torch.full((len(x), 1), 0.6)) / 0.6


class HomeMade(torch.autograd.Function):
    """A checkpoint by hand: it computes its inside again, in the mode in which the backward pass meets it."""

    @staticmethod
    def forward(ctx, inside, x, *weights):
        ctx.inside = inside
        ctx.save_for_backward(x, *weights)
        return inside(x, *weights)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return None, *torch.autograd.grad(ctx.inside(*inputs), inputs, gradient)


class Recomputed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.path, self.last, self.how = nn.Linear(3, 4), DropPath(), nn.Linear(4, 2), how

    def forward(self, x):
        return self.last(self.how(self, x))

    def block(self, x, weight, bias):
        return self.path(F.linear(x, weight, bias).tanh())


def plainly(model, x):
    return model.block(x, model.first.weight, model.first.bias)


def by_torch(model, x):
    return checkpoint(model.block, x, model.first.weight, model.first.bias, use_reentrant=False)


def by_hand(model, x):
    if model.training:
        return plainly(model, x)
    return HomeMade.apply(model.block, x, model.first.weight, model.first.bias)


# Methods that put other tensors in the place of the weights refuse torch's checkpoints, which would not see these.
RUNS = [(name, by_hand) for name in [*METHODS, "direct"]]
RUNS += [(name, by_torch) for name, _ in RUNS if name not in ("unrolled", "forward")]


@pytest.mark.parametrize(("name", "how"), RUNS)
def test_the_backward_pass_of_the_validation_loss_runs_in_its_mode(name, how):
    method = br.Direct() if name == "direct" else METHODS[name]
    model, b, v = Recomputed(plainly), batch(), batch()
    # Hyperparameters inside the checkpointed part have a direct term.
    hyper = model.first if name == "direct" else WeightDecay(model, initial=0.3, per="tensor")
    train = fit if name == "direct" else regularised
    problem = br.Problem(model, hyper, train, fit)
    expected = br.hypergradient(problem, b, v, method, seed=3)
    problem.forget(method)
    model.how = how
    got = br.hypergradient(problem, b, v, method, seed=3)
    assert model.training
    assert model.path.training
    for n, x in expected.total.items():
        assert torch.allclose(got.total[n], x, rtol=1e-9, atol=1e-12)


def test_a_part_that_is_computed_again_draws_the_same_masks():
    model, b = Recomputed(plainly), batch()
    found = []
    for run in (plainly, lambda m, x: HomeMade.apply(m.block, x, m.first.weight, m.first.bias)):

        def val(m, h, b, run=run):
            return F.mse_loss(m.last(run(m, b[0])), b[1])

        problem = problem_of(model, val_loss=val, val_mode="as_is")
        found.append(br.hypergradient(problem, b, b, br.Implicit(br.Exact()), seed=3).total)
    assert all(torch.allclose(x, found[1][n], rtol=1e-9, atol=1e-12) for n, x in found[0].items())


def test_edits_in_a_hypernetwork_are_named():
    model, b = Clamped(clamp_data), batch()
    nn.init.constant_(model.inside.weight, 0.5)
    network = br.hypernetworks.LinearHypernetwork(problem_of(model))
    with pytest.raises(br.Error, match=r"val_loss must leave.*inside\.weight"):
        br.hypergradient(network.problem, b, b, br.Direct())


def test_checkpoints_with_dropout_in_a_validation_loss_of_training_mode():
    def how(model, x):
        return checkpoint(model.block, x, model.first.weight, model.first.bias, use_reentrant=False)

    model, b = Recomputed(plainly), batch()
    model.path = nn.Dropout(0.5)
    problem = problem_of(model, val_mode="as_is")
    expected = br.hypergradient(problem, b, b, br.Implicit(br.Exact()), seed=3)
    model.how = how
    got = br.hypergradient(problem, b, b, br.Implicit(br.Exact()), seed=3)
    assert all(torch.allclose(got.total[n], x) for n, x in expected.total.items())


def test_generators_in_collections_of_a_module_are_put_back():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.generators = nn.Linear(3, 2), [torch.Generator().manual_seed(3)]

        def forward(self, x):
            return self.layer(x * (torch.rand(x.shape, generator=self.generators[0]) < 0.5))

    model = Masked()
    before = model.generators[0].get_state()
    decay = br.hyperparameters.WeightDecay(model)
    loss = lambda m, h, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: loss(m, h, b) + h(m), loss)
    batch = torch.randn(12, 3), torch.randn(12, 2)
    one, other = (br.hypergradient(problem, batch, batch, br.Implicit(br.Exact(0.1)), seed=1) for _ in "ab")
    assert torch.equal(before, model.generators[0].get_state())
    assert all(torch.equal(one.total[n], other.total[n]) for n in one.total)
