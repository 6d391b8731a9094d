"""Differences of gradients in the precision in which a loss computes: right, or refused by name."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse import _tree
from bestresponse.passes.arithmetic import arithmetic


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.mix, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        q, k, v = (z[:, None] for z in self.mix(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Rows of its embedding are short beside the norm of all weights: gains of one are most of that."""

    def __init__(self, tokens=48, d=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, d), nn.Embedding(16, d)
        self.block, self.norm = Block(d), nn.LayerNorm(d)
        for w in self.parameters():
            if w.dim() > 1:
                nn.init.normal_(w, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.norm(self.block(x)) @ self.tokens.weight.T


class Recurrent(nn.Module):
    def __init__(self, tokens=48, d=16):
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(tokens, d), nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, tokens)

    def forward(self, tokens):
        return self.out(self.lstm(self.tokens(tokens))[0])


def perceptron(activation=nn.Tanh):
    return nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 4))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.SiLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def of_sources(losses, sources=4):
    """A problem with a weight for each of some sources of data, and a decay."""

    def train_loss(model, hyper, batch):
        weights = hyper["sources"].exp()[torch.arange(len(batch[0])) % sources]
        decay = sum(w.square().sum() for w in model.parameters() if w.requires_grad)
        return (weights * losses(model, batch)).mean() + hyper["decay"].exp() * decay

    def val_loss(model, hyper, batch):
        return losses(model, batch).mean()

    hyper = nn.ParameterDict({"sources": torch.zeros(sources), "decay": torch.tensor(-5.0)})
    return hyper, train_loss, val_loss


def of_classes(model, batch):
    x = batch[0].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(x).to(x.dtype), batch[1], reduction="none")


def of_text(model, batch):
    z = model(batch[0])[:, :-1]
    return (
        F.cross_entropy(z.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none").view(len(z), -1).mean(1)
    )


def classes(model, shape=(8,), steps=0):
    batches = [(torch.randn(32, *shape), torch.randint(4, (32,))) for _ in range(2)]
    model(batches[0][0])
    return trained(model, of_classes, batches, steps)


def text(model, steps=0):
    return trained(model, of_text, [(torch.randint(48, (12, 16)),), (torch.randint(24, (6, 16)),)], steps)


def trained(model, losses, batches, steps):
    """The problem after some steps of Adam, and the same in float64."""
    hyper, train_loss, val_loss = of_sources(losses)
    problem = br.Problem(model, hyper, train_loss, val_loss)
    weights = list(problem.weights.values())
    adam = torch.optim.Adam(weights, 3e-3)
    for _ in range(steps):
        found = torch.autograd.grad(train_loss(model, hyper, batches[0]), weights)
        for w, g in zip(weights, found, strict=True):
            w.grad = g
        adam.step()
        adam.zero_grad()
    precise = br.Problem(*copy.deepcopy((model, hyper)), train_loss, val_loss)
    precise.model.double(), precise.hyper.double()
    return problem, precise, batches


def in_bfloat16(problem):
    def cast(loss):
        def run(model, hyper, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return loss(model, hyper, batch)

        return run

    return br.Problem(problem.model, problem.hyper, cast(problem.train_loss), cast(problem.val_loss))


def error(found, exact):
    a, b = (torch.cat([x.detach().double().reshape(-1) for x in tree.values()]) for tree in (found, exact))
    return float((a - b).norm() / b.norm())


def hypergradient_error(problem, precise, batches, method, exact=None):
    found = br.hypergradient(problem, *batches, method)
    return error(found.total, br.hypergradient(precise, *batches, exact or method).total)


SMOOTH = {
    "transformer": lambda steps: text(Transformer(), steps),
    "recurrent": lambda steps: text(Recurrent(), steps),
    "perceptron": lambda steps: classes(perceptron(), steps=steps),
    "convolutional": lambda steps: classes(convolutional(), (1, 10, 10), steps),
}


@pytest.mark.filterwarnings("error::bestresponse.BestResponseWarning")
@pytest.mark.parametrize("steps", [0, 100])
@pytest.mark.parametrize("kind", SMOOTH)
def test_products_mixed_terms_and_hypergradients_in_float32(kind, steps):
    problem, precise, batches = SMOOTH[kind](steps)
    with precise.undisturbed() as passes:
        exact = br.Hessian().linearise(passes, batches[0])
        gradient = torch.autograd.grad(passes.val_loss(batches[1]), list(precise.weights.values()))
        v = dict(zip(precise.weights, gradient, strict=True))
        expected = exact(v), exact.mixed(v)
    with problem.undisturbed(twice=False) as passes:
        system = br.FiniteDifference().linearise(passes, batches[0])
        v = {n: x.float() for n, x in v.items()}
        assert error(system(v), expected[0]) < 5e-3
        assert error(system.mixed(v), expected[1]) < 1e-2
    solver = br.ConjugateGradient(10, damping=10.0)
    differences, hessian = br.Implicit(solver, br.FiniteDifference()), br.Implicit(solver)
    assert hypergradient_error(problem, precise, batches, differences, hessian) < 2e-2


def test_sama_with_gradient_descent_is_the_identity_in_float32():
    problem, precise, batches = text(Transformer(), 100)
    identity = br.Implicit(br.Identity())
    sama = br.SAMA(br.rules.SGD())
    assert hypergradient_error(problem, precise, batches, sama, identity) < 1e-2


def test_differences_in_bfloat16_are_resolved():
    problem, precise, batches = classes(perceptron(), steps=100)
    low = in_bfloat16(problem)
    method = br.Implicit(br.ConjugateGradient(10, damping=1.0), br.FiniteDifference())
    exact = br.Implicit(br.ConjugateGradient(10, damping=1.0))
    assert hypergradient_error(low, precise, batches, method, exact) < 0.1
    assert "bfloat16" in br.hypergradient(low, *batches, method).solve.detail
    assert (
        hypergradient_error(low, precise, batches, br.SAMA(br.rules.SGD()), br.Implicit(br.Identity())) < 0.1
    )


def test_differences_beside_frozen_layers_in_bfloat16_are_resolved():
    """Adapters in float32, of which one side is zero, on a base in bfloat16."""

    class Adapted(nn.Module):
        def __init__(self, fan_in, fan_out):
            super().__init__()
            self.base = nn.Linear(fan_in, fan_out).requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, fan_in) / fan_in**0.5)
            self.b = nn.Parameter(torch.zeros(fan_out, 2))

        def forward(self, x):
            y = self.base(x.to(self.base.weight.dtype))
            return y + (x.to(self.a.dtype) @ self.a.T @ self.b.T).to(y.dtype)

    model = nn.Sequential(Adapted(8, 16), nn.Tanh(), Adapted(16, 4))
    problem, precise, batches = classes(model)
    for layer in (model[0], model[2]):
        layer.base.bfloat16()
    method = br.Implicit(br.ConjugateGradient(10, damping=1.0), br.FiniteDifference())
    assert hypergradient_error(problem, precise, batches, method, br.Implicit(method.solver)) < 0.1
    with pytest.raises(br.Error, match="Penalty .* bfloat16"):
        br.hypergradient(problem, *batches, br.Penalty(5, 0.1))


@pytest.mark.filterwarnings("ignore:FiniteDifference needs a smooth")
def test_differences_that_bfloat16_does_not_resolve_are_refused():
    problem, _, batches = classes(perceptron(nn.ReLU), steps=100)
    method = br.Implicit(br.ConjugateGradient(10, damping=1.0), br.FiniteDifference())
    with pytest.raises(br.Error, match=r"computes in bfloat16, has kinks \(ReluBackward0\)"):
        br.hypergradient(in_bfloat16(problem), *batches, method)


def test_a_step_below_the_precision_of_the_loss_is_refused():
    problem, _, batches = classes(perceptron())
    method = br.Implicit(br.Identity(), br.FiniteDifference(1e-3))
    br.hypergradient(problem, *batches, method)
    with pytest.raises(br.Error, match=r"step must be above 0.008.*bfloat16"):
        br.hypergradient(in_bfloat16(problem), *batches, method)


def waves(factor):
    """∂L_T/∂w bends within 1/factor of the weights' size."""
    model, hyper = nn.ParameterDict({"w": torch.randn(50)}), nn.ParameterDict({"c": torch.zeros(())})

    def train_loss(model, hyper, batch):
        return (factor * model["w"] + hyper["c"]).sin().mean() / factor

    return br.Problem(model, hyper, train_loss, lambda m, h, b: m["w"].sum())


def test_a_step_is_found_where_the_usual_one_is_too_large():
    problem, curvature = waves(400.0), br.FiniteDifference()
    found = br.hypergradient(problem, None, None, br.Implicit(br.Identity(), curvature)).total["c"]
    expected = float((400.0 * problem.weights["w"].detach().double()).sin().mean())
    assert float(found) == pytest.approx(expected, rel=0.02)
    assert problem.state(curvature).memory["mixed"]["step"] < 1e-3
    given = br.Implicit(br.Identity(), br.FiniteDifference(0.01))
    with pytest.warns(br.BestResponseWarning, match="two steps give a mixed term that differ"):
        found = br.hypergradient(problem, None, None, given).total["c"]
    assert float(found) != pytest.approx(expected, rel=0.1)


def test_rounding_within_the_loss_is_warned_of():
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return (64 * x).round() / 64

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Coarse(nn.Module):
        def forward(self, x):
            return Rounded.apply(x.tanh())

    problem, _, batches = classes(perceptron(Coarse))
    method = br.Implicit(br.ConjugateGradient(3, damping=1.0), br.FiniteDifference())
    with pytest.warns(br.BestResponseWarning, match="two steps give products"):
        br.hypergradient(problem, *batches, method)


def counted(problem):
    """How often the training loss has run, in a list of one."""
    runs, loss = [0], problem.train_loss

    def run(*arguments):
        runs[0] += 1
        return loss(*arguments)

    problem.train_loss = run
    return runs


def test_a_step_is_verified_once_and_again_when_the_weights_have_doubled():
    problem, _, batches = classes(perceptron())
    runs, method = counted(problem), br.Implicit(br.Identity(), br.FiniteDifference())

    def cost():
        runs[0] = 0
        br.hypergradient(problem, *batches, method)
        return runs[0]

    assert [cost(), cost()] == [5, 3]  # one to see what the loss reaches, and two for a difference
    with torch.no_grad():
        problem.model[0].weight.mul_(1.9)
    assert cost() == 3
    with torch.no_grad():
        problem.model[0].weight.mul_(1.9)
    assert [cost(), cost()] == [5, 3]


@pytest.mark.parametrize(
    "method",
    [br.Implicit(br.Identity(), br.FiniteDifference()), br.Penalty(2, 0.1)],
    ids=lambda m: type(m).__name__,
)
def test_a_graph_that_the_caller_holds_outlives_a_difference(method):
    problem, _, batches = classes(perceptron())
    pending = problem.train_loss(problem.model, problem.hyper, batches[0])
    expected = torch.autograd.grad(pending, list(problem.weights.values()), retain_graph=True)
    br.hypergradient(problem, *batches, method)
    found = torch.autograd.grad(pending, list(problem.weights.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_size_of_a_direction_does_not_matter(scale):
    problem, _, batches = classes(perceptron())
    v = {n: torch.randn_like(w) for n, w in problem.weights.items()}
    with problem.undisturbed(twice=False) as passes:
        system = br.FiniteDifference().linearise(passes, batches[0])
        plain, scaled = system(v), system({n: scale * x for n, x in v.items()})
    assert error({n: x.double() / scale for n, x in scaled.items()}, plain) < 1e-3


def test_weights_of_zero_have_a_step():
    """A linear model at its start, and a fresh bias beside other weights."""
    model = nn.Linear(8, 4)
    nn.init.zeros_(model.bias)
    for _ in range(2):
        problem, precise, batches = classes(copy.deepcopy(model))
        method = br.Implicit(br.ConjugateGradient(5, damping=1.0), br.FiniteDifference())
        assert hypergradient_error(problem, precise, batches, method, br.Implicit(method.solver)) < 1e-2
        nn.init.zeros_(model.weight)


# --- Penalty ----------------------------------------------------------------------------------------


def test_penalty_refuses_weights_in_bfloat16():
    problem, _, batches = classes(perceptron())
    problem.model.bfloat16()
    with pytest.raises(br.Error, match="Penalty needs weights in float32.*bfloat16"):
        br.hypergradient(problem, *batches, br.Penalty(5, 0.1))


def test_penalty_in_bfloat16_is_resolved_or_refused():
    problem, precise, batches = classes(perceptron(), steps=100)
    low = in_bfloat16(problem)
    assert hypergradient_error(low, precise, batches, br.Penalty(5, 0.1, 1.0)) < 0.1
    for multiplier in (100.0, 1e8):  # at which rounding is as large as the difference, and all that there is
        with pytest.raises(br.Error, match="bfloat16.*smaller multiplier"):
            br.hypergradient(low, *batches, br.Penalty(5, 0.1, multiplier))


def test_penalty_in_float32_warns_of_a_multiplier_that_it_does_not_resolve():
    problem, precise, batches = classes(perceptron(), steps=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hypergradient_error(problem, precise, batches, br.Penalty(5, 0.1)) < 0.01
    with pytest.warns(br.BestResponseWarning, match=r"float32, and with a multiplier of 1e\+06"):
        br.hypergradient(problem, *batches, br.Penalty(5, 0.1, 1e6))


def test_penalty_is_verified_once_and_again_when_weights_or_multiplier_have_doubled():
    problem, _, batches = classes(perceptron())
    method = br.Penalty(2, 0.1, lambda call: 100.0 if call < 3 else 250.0)
    runs = counted(problem)

    def cost():
        runs[0] = 0
        br.hypergradient(problem, *batches, method)
        return runs[0]

    assert [cost(), cost()] == [11, 7]
    with torch.no_grad():
        problem.model[0].weight.mul_(2.1)
    assert [cost(), cost(), cost()] == [11, 11, 7]


# --- the precision of a loss ------------------------------------------------------------------------


def test_the_arithmetic_of_a_loss_is_its_coarsest():
    model, x = perceptron(), torch.randn(5, 8)
    assert arithmetic(model(x).sum()).name == "float32"
    assert not arithmetic(model(x).sum()).low
    assert arithmetic(model.double()(x.double()).sum()).name == "float64"
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    assert (arithmetic(loss).name, arithmetic(loss).low) == ("bfloat16", True)
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "bf16"
        assert arithmetic(model(x).sum()).name == "bfloat16"
        assert arithmetic(x.requires_grad_().exp().sum()).name == "float32"
    finally:
        settings.fp32_precision = before


def test_root_mean_squares():
    tree = {"a": torch.tensor([3.0, -3.0]), "b": torch.tensor(-2.0), "c": torch.zeros(0)}
    assert _tree.root_mean_squares(tree) == pytest.approx({"a": 3.0, "b": 2.0, "c": 0.0})
    assert _tree.root_mean_squares({}) == {}
