import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases


def loss(model, hyper, batch):
    return model(batch).square().mean() + sum(p.sum() for p in hyper.parameters())


def test_weights_and_hyperparameters_are_live_and_named_without_prefixes():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    hyper = nn.ParameterDict({"rate": nn.Parameter(torch.zeros(2))})
    problem = br.Problem(model, hyper, loss, loss)
    assert list(problem.weights) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert problem.weights["0.weight"] is model[0].weight
    assert problem.hyperparameters == {"rate": hyper["rate"]}
    assert "13 weights" in repr(problem)
    assert "2 hyperparameters" in repr(problem)


def test_hyper_may_be_a_submodule_of_the_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.PReLU(), nn.Linear(3, 1))
    problem = br.Problem(model, model[1], loss, loss)
    assert list(problem.hyperparameters) == ["weight"]
    assert list(problem.weights) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    batch = torch.randn(7, 2)
    implicit = br.hypergradient(problem, batch, batch, br.Implicit(br.Neumann(3, 0.01)))
    unrolled = br.hypergradient(problem, batch, batch, br.Unrolled(1, 0.01))
    assert float(implicit.direct["weight"]) != 0
    assert float(unrolled.direct["weight"]) != 0


def test_frozen_parameters_belong_to_neither_side():
    model, hyper = nn.Linear(2, 2), nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    hyper.bias.requires_grad_(False)
    problem = br.Problem(model, hyper, loss, loss)
    assert list(problem.weights) == ["weight"]
    assert list(problem.hyperparameters) == ["weight"]


def test_shared_parameters_appear_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(3, 3, bias=False)
            self.decode = nn.Linear(3, 3, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(self.encode(x).tanh())

    model = Tied()
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    problem = br.Problem(
        model, decay, lambda m, h, b: m(b).square().mean() + h(m), lambda m, h, b: m(b).mean()
    )
    assert list(problem.weights) == ["encode.weight"]
    batch = torch.randn(5, 3)
    neumann = br.hypergradient(problem, batch, batch, br.Implicit(br.Neumann(0, 0.1)))
    unrolled = br.hypergradient(problem, batch, batch, br.Unrolled(1, 1e-7))
    one, other = (h.indirect["log_decay.encode.weight"] for h in (neumann, unrolled))
    assert torch.allclose(one / 0.1, other / 1e-7, rtol=1e-5, atol=1e-9)


def test_the_hypergradient_of_float32_modules_is_near_that_of_float64():
    problem, train, val = cases.network()
    double = br.hypergradient(problem, train, val, br.Implicit(br.Exact(damping=0.5)))
    problem.model.float(), problem.hyper.float()
    single = br.hypergradient(
        problem, (train[0].float(), train[1]), (val[0].float(), val[1]), br.Implicit(br.Exact(damping=0.5))
    )
    for name in double.total:
        assert single.total[name].dtype == torch.float32
        assert torch.allclose(single.total[name].double(), double.total[name], rtol=1e-3, atol=1e-6)


def test_bfloat16_autocast():
    problem, train, val = cases.network()
    problem.model.float(), problem.hyper.float()
    train, val = (train[0].float(), train[1]), (val[0].float(), val[1])
    plain = br.hypergradient(problem, train, val, br.Implicit(br.Exact(damping=0.5)))

    def cast(function):
        def wrapped(model, hyper, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return function(model, hyper, batch)

        return wrapped

    mixed = br.Problem(problem.model, problem.hyper, cast(problem.train_loss), cast(problem.val_loss))
    h = br.hypergradient(mixed, train, val, br.Implicit(br.Exact(damping=0.5)))
    one, other = (torch.cat([x.view(-1) for x in y.total.values()]) for y in (plain, h))
    assert float(F.cosine_similarity(one, other, dim=0)) > 0.99


def holding(model):
    hyper = nn.Module()
    hyper.rate = nn.Parameter(torch.zeros(()))
    hyper.model = model
    return hyper


@pytest.mark.parametrize(
    ("make", "words", "kind"),
    [
        (lambda m, h: (None, h, loss, loss), "Problem.model must be a torch.nn.Module", TypeError),
        (
            lambda m, h: (m, [torch.zeros(1)], loss, loss),
            "Problem.hyper must be a torch.nn.Module",
            TypeError,
        ),
        (lambda m, h: (m, h, None, loss), "Problem.train_loss must be a function", TypeError),
        (lambda m, h: (m, h, loss, 3), "Problem.val_loss must be a function", TypeError),
        (lambda m, h: (m, h, loss, loss, "train"), "val_mode must be", ValueError),
        (lambda m, h: (nn.Flatten(), h, loss, loss), "model must have a trainable parameter", ValueError),
        (lambda m, h: (m, nn.Flatten(), loss, loss), "hyper must have a trainable parameter", ValueError),
        (lambda m, h: (m, m, loss, loss), "model must have a trainable parameter that is not", ValueError),
        (lambda m, h: (m, holding(m), loss, loss), r"holds \['Linear', 'weight', 'bias'\]", ValueError),
        (lambda m, h: (m, nn.ParameterList([m.weight]), loss, loss), r"holds \['weight'\]", ValueError),
        (lambda m, h: (nn.Linear(2, 2, dtype=torch.complex64), h, loss, loss), "must be real", ValueError),
    ],
)
def test_bad_problems(make, words, kind):
    model, hyper = nn.Linear(2, 2), nn.ParameterList([nn.Parameter(torch.zeros(2))])
    with pytest.raises(br.Error, match=words) as caught:
        br.Problem(*make(model, hyper))
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x.expand(3), r"must return a scalar tensor; got shape \[3\]"),
        (lambda x: float(x), "must return a scalar tensor; got a float. Return the tensor"),
        (lambda x: None, "must return a scalar tensor; got a NoneType"),
        (
            lambda x: x.detach(),
            "must depend on the weights or hyperparameters by a graph; got a detached value",
        ),
        (lambda x: x / 0, "must be finite; got inf"),
        (lambda x: x * float("nan"), "must be finite; got nan"),
    ],
)
@pytest.mark.parametrize("which", ["train_loss", "val_loss"])
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_bad_losses(which, spoil, words):
    problem, train, val = cases.network()
    function = getattr(problem, which)
    setattr(problem, which, lambda m, h, b: spoil(function(m, h, b)))
    for method in (br.Implicit(br.Identity()), br.Unrolled(1, 0.1)):
        with pytest.raises(br.Error, match=f"{which} {words}") as caught:
            br.hypergradient(problem, train, val, method)
        assert isinstance(caught.value, RuntimeError)


def test_a_training_loss_of_other_weights_is_an_error():
    problem, train, val = cases.network()
    other = copy.deepcopy(problem.model)
    problem.train_loss = lambda m, h, b: (
        F.cross_entropy(other(b[0]), b[1]) + sum(p.sum() for p in h.parameters())
    )
    with pytest.raises(br.Error, match="must depend on a weight of the model"):
        br.hypergradient(problem, train, val, br.Implicit(br.Identity()))


def test_an_infinite_validation_gradient_is_named():
    problem, train, val = cases.network()
    problem.val_loss = lambda m, h, b: (
        (m[0].weight - m[0].weight.detach()).abs().sum().sqrt() + m[0].bias.sum()
    )
    with pytest.raises(br.Error, match=r"gradient of val_loss must be finite.*0\.weight"):
        br.hypergradient(problem, train, val, br.Implicit(br.Identity()))


def test_buffers_modes_and_random_state_come_back_after_an_error():
    problem, train, val = cases.network(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    problem.model[0].eval()
    before = {n: (b, b.clone()) for n, b in problem.model.named_buffers()}
    random_state = torch.get_rng_state()

    def failing(model, hyper, batch):
        model(batch[0])
        raise RuntimeError("out of memory")

    problem.val_loss = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        br.hypergradient(problem, train, val, br.Implicit(br.Identity()))
    for name, buffer in problem.model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])
    assert [m.training for m in problem.model] == [False, True, True, True]
    assert torch.equal(random_state, torch.get_rng_state())


def test_the_validation_loss_runs_the_hyperparameters_in_eval_mode_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.mask = nn.Parameter(torch.ones(3)), nn.Dropout(0.5)

        def forward(self, x):
            return self.mask(self.scale * x)

    def loss(model, hyper, x):
        return model(hyper(x)).square().mean() + model.weight.square().sum()

    x, problem = torch.randn(8, 3), br.Problem(nn.Linear(3, 1), Masked(), loss, loss)
    h = br.hypergradient(problem, x, x, br.Implicit(br.Identity()), seed=1)
    model, scale = problem.model, problem.hyper.scale
    expected = model(scale * x).square().mean() + model.weight.square().sum()
    assert h.val_loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert torch.allclose(h.direct["scale"], torch.autograd.grad(expected, scale)[0])
    assert problem.hyper.mask.training


def test_numpy_and_python_randomness_is_replayed_and_put_back():
    numpy = pytest.importorskip("numpy")
    import random

    problem, train, val = cases.network()
    plain = problem.train_loss
    drawn = []

    def noisy(model, hyper, batch):
        drawn.append((random.random(), float(numpy.random.rand())))
        return plain(model, hyper, batch)

    problem.train_loss = noisy
    random.seed(3), numpy.random.seed(3)
    br.hypergradient(
        problem, train, val, br.Implicit(br.ConjugateGradient(2, damping=1.0), br.FiniteDifference())
    )
    assert len(drawn) > 3
    assert len(set(drawn)) == 1
    assert (random.random(), float(numpy.random.rand())) == drawn[0]


def test_a_graph_that_the_caller_holds_survives():
    problem, train, val = cases.network()
    training = problem.train_loss(problem.model, problem.hyper, train)
    br.hypergradient(problem, train, val, br.Implicit())
    training.backward()


def test_a_group_that_is_initialised_after_the_problem_is_named_once(monkeypatch):
    model, hyper = nn.Linear(2, 1), nn.ParameterDict({"rate": nn.Parameter(torch.zeros(2))})
    problem, batch = br.Problem(model, hyper, loss, loss), torch.randn(4, 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.warns(br.BestResponseWarning, match="initialised after this problem"):
        br.hypergradient(problem, batch, batch, br.Direct())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        br.hypergradient(problem, batch, batch, br.Direct())
