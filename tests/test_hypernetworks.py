import copy
import itertools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import bestresponse as br
from bestresponse import hypernetworks
from bestresponse.hypernetworks import LinearHypernetwork, SelfTuning
from bestresponse.runs import callbacks

KINDS = {"linear": LinearHypernetwork, "self-tuning": SelfTuning}
both = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Decays(nn.Module):
    def __init__(self, count, start):
        super().__init__()
        self.log_decay = nn.Parameter(torch.full((count,), start))


class Ridge:
    """Twelve examples with much noise, of eight features that share one decay, or two: the best one is inside."""

    def __init__(self, decays=1, start=-5.0):
        truth = torch.randn(8) * torch.tensor([1.0] * 4 + [0.3] * 4)
        self.x, self.x_val = torch.randn(12, 8), torch.randn(200, 8)
        self.y, self.y_val = (x @ truth + 2.0 * torch.randn(len(x)) for x in (self.x, self.x_val))
        self.train, self.val = (self.x, self.y), (self.x_val, self.y_val)
        self.of_feature = torch.arange(8) * decays // 8
        self.model, self.hyper = nn.Linear(8, 1, bias=False), Decays(decays, start)

        def fit(model, hyper, batch):
            return (model(batch[0])[:, 0] - batch[1]).square().mean() / 2

        def train_loss(model, hyper, batch):
            rates = hyper.log_decay.exp()[self.of_feature]
            return fit(model, hyper, batch) + (rates * model.weight.square()).sum() / 2

        self.problem = br.Problem(self.model, self.hyper, train_loss, fit)

    def response(self, log_decay):
        """w*(λ) = (XᵀX/n + diag e^λ)⁻¹ Xᵀy/n."""
        curvature = self.x.T @ self.x / len(self.x) + torch.diag(log_decay.exp()[self.of_feature])
        return torch.linalg.solve(curvature, self.x.T @ self.y / len(self.x))

    def best_val_loss(self, log_decay):
        """L_V(w*(λ))."""
        return float((self.x_val @ self.response(log_decay) - self.y_val).square().mean() / 2)


def tune(network, train, val, steps, rate=0.03, warmup=0, **arguments):
    """Run a tuner whose weight rate falls to zero."""
    weights = torch.optim.Adam(network.parameters(), rate)
    hyper = torch.optim.Adam(network.problem.hyperparameters.values(), 0.05)
    falling = CosineAnnealingLR(weights, warmup + steps * arguments.get("weight_steps", 1))
    tuner = br.Tuner(
        network.problem,
        weights,
        hyper,
        br.Direct(),
        warmup_steps=warmup,
        weight_scheduler=falling,
        **arguments,
    )
    tuner.fit([train], [val], steps)
    return tuner


def disturb(network):
    """Give φ values at which every part of it counts."""
    with torch.no_grad():
        for p in network.problem.weights.values():
            p += 0.3 * torch.randn_like(p)


# --- the best response, and what it tunes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "decays", "start"),
    [
        pytest.param(lambda p: LinearHypernetwork(p, scale=0.2), 2, 3.0, marks=pytest.mark.slow),
        (lambda p: SelfTuning(p, scale=0.3, entropy=0.01), 1, -3.0),
    ],
    ids=["linear, two decays", "self-tuning"],
)
def test_ridge_is_tuned_and_its_best_response_learnt(make, decays, start):
    ridge = Ridge(decays, start)
    network = make(ridge.problem)
    grid = itertools.product(torch.linspace(-5, 3, 41), repeat=decays)
    best = min(ridge.best_val_loss(torch.stack(point)) for point in grid)
    assert ridge.best_val_loss(ridge.hyper.log_decay.detach()) > 1.1 * best
    tune(network, ridge.train, ridge.val, 200, warmup=200, weight_steps=5, callbacks=[network.recentre])

    tuned = ridge.hyper.log_decay.detach()
    assert ridge.best_val_loss(tuned) < 1.01 * best
    for shift in (0.0, 0.2, -0.2):
        expected = ridge.response(tuned + shift)
        w = network.weights({"log_decay": tuned + shift})["weight"][0]
        assert float((w - expected).norm() / expected.norm()) < 0.01
    slope = torch.autograd.functional.jacobian(ridge.response, tuned)
    learnt = torch.stack(
        [
            (network.weights({"log_decay": tuned + e})["weight"] - network.weights()["weight"])[0] / 1e-3
            for e in 1e-3 * torch.eye(decays)
        ],
        dim=1,
    )
    assert float((learnt - slope).norm() / slope.norm()) < 0.15


def test_global_sampling_learns_the_response_over_a_range():
    ridge = Ridge(start=-1.0)
    network = LinearHypernetwork(ridge.problem, scale=0.5, sampling="global")
    optimizer = torch.optim.Adam(network.problem.weights.values(), 0.03)
    for _ in range(800):
        optimizer.zero_grad()
        network.problem.train_loss(network, ridge.hyper, ridge.train).backward()
        optimizer.step()
    constant = ridge.response(torch.tensor([-1.0]))
    for point in (-1.5, -0.5):
        expected = ridge.response(torch.tensor([point]))
        w = network.weights({"log_decay": torch.tensor([point])})["weight"][0]
        assert float((w - expected).norm()) < 0.25 * float((constant - expected).norm())
    tune(network, ridge.train, ridge.val, 2)
    assert bool((ridge.hyper.log_decay != -1.0).all())


@both
def test_the_hypergradient_is_that_of_the_learnt_response(kind):
    ridge = Ridge(2, -1.0)
    fit = ridge.problem.val_loss

    def val_loss(model, hyper, batch):
        return fit(model, hyper, batch) + 0.1 * hyper.log_decay.square().sum()

    network = kind(br.Problem(ridge.model, ridge.hyper, ridge.problem.train_loss, val_loss), scale=0.4)
    disturb(network)
    result = br.hypergradient(network.problem, ridge.train, ridge.val, br.Direct(), seed=7)

    def loss():
        return br.hypergradient(network.problem, ridge.train, ridge.val, br.Direct(), seed=7).val_loss

    for name, parameter in network.problem.hyperparameters.items():
        for i in range(2):
            with torch.no_grad():
                parameter[i] += 1e-5
                above = loss()
                parameter[i] -= 2e-5
                below = loss()
                parameter[i] += 1e-5
            assert float(result.total[name][i]) == pytest.approx((above - below) / 2e-5, rel=1e-6)
    if kind is LinearHypernetwork:
        with torch.no_grad():
            ridge.model.weight.copy_(network.weights()["weight"])
            expected = val_loss(ridge.model, ridge.hyper, ridge.val)
        assert result.val_loss == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("sampling", ["local", "global"])
def test_the_training_loss_is_that_of_perturbed_hyperparameters(sampling):
    ridge = Ridge(2, -1.0)
    network = LinearHypernetwork(ridge.problem, scale=0.4, sampling=sampling, samples=3)
    disturb(network)
    with torch.no_grad():
        ridge.hyper.log_decay += 2.0
    middle = torch.full((2,), 1.0 if sampling == "local" else -1.0)
    losses = []
    torch.manual_seed(3)
    points = [middle + 0.4 * torch.randn(2) for _ in range(3)]
    model, hyper = nn.Linear(8, 1, bias=False), Decays(2, 0.0)
    for point in points:
        with torch.no_grad():
            model.weight.copy_(network.weights({"log_decay": point})["weight"])
            hyper.log_decay.copy_(point)
        losses.append(float(ridge.problem.train_loss(model, hyper, ridge.train).detach()))
    torch.manual_seed(3)
    loss = network.problem.train_loss(network, ridge.hyper, ridge.train)
    assert float(loss.detach()) == pytest.approx(sum(losses) / 3, rel=1e-12)


@both
def test_recentring_changes_no_weights(kind):
    ridge = Ridge(2, -1.0)
    network = kind(ridge.problem)
    disturb(network)
    with torch.no_grad():
        ridge.hyper.log_decay += torch.tensor([1.0, -2.0])
    points = [torch.randn(2) for _ in range(3)]
    before = [network.weights({"log_decay": p})["weight"] for p in points]
    here = network.weights()["weight"]
    assert not torch.allclose(network.base[0], here)
    network.recentre()
    after = [network.weights({"log_decay": p})["weight"] for p in points]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(after, before, strict=True))
    assert torch.equal(network.base[0], here)
    assert torch.equal(network.centre, ridge.hyper.log_decay)


def test_global_sampling_has_a_fixed_centre():
    network = LinearHypernetwork(Ridge().problem, sampling="global")
    with pytest.raises(br.Error, match='sampling="local"'):
        network.recentre()


# --- every kind of model ---------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An embedding whose weight is the decoder's too, and an LSTM."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.decoder = nn.Embedding(7, 4), nn.LSTM(4, 4), nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.lstm(self.embedding(tokens))[0])


class Convolutional(nn.Module):
    """Convolutions, transposed ones with groups among them, batch norm, and a parameter of no module of torch's."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Tanh()
        )
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.temperature * self.body(x).flatten(1)


class Inside(nn.Module):
    """Hyperparameters that are a part of the model: a scale of its input."""

    def __init__(self):
        super().__init__()
        self.scale = Decays(3, 0.1)
        self.scale.calls = 0
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    def forward(self, x):
        self.scale.calls += 1
        return self.layer(x * self.scale.log_decay.exp())


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def zoo(name):
    """A problem and two batches."""
    torch.manual_seed(4)
    if name == "recurrent":
        model, batches = Recurrent(), [torch.randint(7, (5, 3)) for _ in range(2)]
    elif name == "convolutional":
        model, batches = Convolutional(), [torch.randn(3, 2, 5, 5) for _ in range(2)]
    else:
        model = Inside() if name == "inside" else Twice()
        batches = [torch.randn(4, 3) for _ in range(2)]
    hyper = (
        model.scale if name == "inside" else br.hyperparameters.WeightDecay(model, per="tensor", initial=0.1)
    )

    def val_loss(model, hyper, batch):
        loss = model(batch).square().mean() + model(batch).sin().mean()
        return loss * min(hyper.calls, 1) if name == "inside" else loss

    def train_loss(model, hyper, batch):
        return val_loss(model, hyper, batch) + (0.0 if name == "inside" else hyper(model))

    return br.Problem(model, hyper, train_loss, val_loss), *batches


ZOO = ["recurrent", "convolutional", "inside", "twice"]


def at(problem, weights, shift):
    """Copies of the modules with these weights and hyperparameters moved by ``shift``."""
    model, hyper = copy.deepcopy((problem.model, problem.hyper))
    with torch.no_grad():
        for name, w in weights.items():
            dict(model.named_parameters())[name].copy_(w)
        for name in problem.hyperparameters:
            dict(hyper.named_parameters())[name].add_(shift)
    return model, hyper


@both
@pytest.mark.parametrize("name", ZOO)
def test_it_begins_as_the_model(kind, name):
    problem, batch, _ = zoo(name)
    network = kind(problem)
    weights = network.weights()
    assert all(torch.equal(w, weights[n]) for n, w in problem.weights.items())
    assert weights.keys() == problem.weights.keys()
    assert not any(w.requires_grad for w in weights.values())
    assert torch.equal(network(batch), problem.model(batch))


@both
@pytest.mark.parametrize("name", ZOO)
def test_losses_are_those_of_the_model_with_the_weights_of_the_network(kind, name):
    problem, train, val = zoo(name)
    network = kind(problem)
    disturb(network)
    shifted = {n: p.detach() + 0.5 for n, p in problem.hyperparameters.items()}
    expected = problem.val_loss(*at(problem, network.weights(shifted), 0.5), val)
    with torch.no_grad():
        for p in problem.hyperparameters.values():
            p += 0.5
    loss = network.mean_loss("val_loss", [network.vector(problem.hyper)], val)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    loss = network.problem.train_loss(network, network.problem.hyper, train)
    loss.backward()
    # All of φ is reached, and nothing else of the network is there to be trained.
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.problem.weights.values())
    assert {n for n, p in network.named_parameters() if p.numel()} == network.problem.weights.keys()
    assert all(w.grad is None for w in problem.weights.values())


@both
@pytest.mark.parametrize("name", ZOO)
def test_the_given_modules_stay_as_they_are(kind, name):
    problem, train, val = zoo(name)
    problem.model.train()
    before = copy.deepcopy(problem.model.state_dict())
    network = kind(problem)
    tune(network, train, val, 2)
    tuned = {id(p) for p in problem.hyperparameters.values()}
    for n, x in problem.model.state_dict(keep_vars=True).items():
        assert id(x) in tuned or torch.equal(x, before[n])
    assert all(
        m.training and not m._forward_hooks and not m._forward_pre_hooks for m in problem.model.modules()
    )
    assert all(p.requires_grad and p.grad is None for p in problem.weights.values())
    problem.check_intact()
    problem.train_loss(problem.model, problem.hyper, train)


@both
@pytest.mark.parametrize("name", ZOO)
def test_write_copies_weights_and_buffers(kind, name):
    problem, train, val = zoo(name)
    network = kind(problem)
    tune(network, train, val, 2)
    identities = [id(x) for x in problem.model.state_dict(keep_vars=True).values()]
    network.write_()
    assert [id(x) for x in problem.model.state_dict(keep_vars=True).values()] == identities
    assert torch.equal(network.eval()(val), problem.model.eval()(val))
    if name == "convolutional":
        assert (
            int(problem.model.body[1].num_batches_tracked) == 4
        )  # two calls of the model in each of two steps


UNITS = {
    "linear": (nn.Linear(3, 5), (2, 3), 1),
    "convolution": (nn.Conv1d(4, 6, 2, groups=2), (1, 4, 5), 1),
    "transposed": (nn.ConvTranspose1d(2, 3, 2), (1, 2, 5), 1),
    "transposed in groups": (nn.ConvTranspose2d(4, 6, 2, groups=2), (1, 4, 3, 3), 1),
    "embedding": (nn.Embedding(4, 3), None, 1),
    "layer norm": (nn.LayerNorm(4), (2, 4), 1),
    "batch norm": (nn.BatchNorm1d(4), (3, 4), 1),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_gate_is_that_of_one_output_unit(name):
    layer, shape, axis = UNITS[name]
    layer = copy.deepcopy(layer).double()
    x = torch.randn(shape) if shape else torch.arange(4)
    hyper = Decays(1, 0.0)
    network = SelfTuning(br.Problem(layer, hyper, *[lambda m, h, b: (m(b) * h.log_decay).sum()] * 2))
    before = network(x)
    with torch.no_grad():
        hyper.log_decay += 1.0
    for gates, directions in zip(network.gates, network.directions, strict=True):
        assert len(gates) == before.shape[axis]
        nn.init.ones_(directions)
        for unit in range(len(gates)):
            with torch.no_grad():
                gates.zero_()
                gates[unit] = 1.0
            moved = (network(x) - before).abs().transpose(0, axis).flatten(1).amax(1)
            assert moved.nonzero().flatten().tolist() == [unit]
        nn.init.zeros_(directions)


def test_the_rows_of_an_lstm_are_units():
    problem, *_ = zoo("recurrent")
    network = SelfTuning(problem)
    shapes = {n: len(g) for n, g in zip(problem.weights, network.gates, strict=True)}
    assert shapes["lstm.weight_ih_l0"] == shapes["lstm.weight_hh_l0"] == shapes["lstm.bias_ih_l0"] == 16
    assert shapes["embedding.weight"] == 4


def test_parameters_have_the_dtypes_of_the_weights():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    decay = br.hyperparameters.WeightDecay(model)

    def fit(model, decay, batch):
        return model(batch).float().square().mean()

    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m).float(), fit)
    batch = torch.randn(4, 3, dtype=torch.bfloat16)
    for kind in KINDS.values():
        network = kind(problem)
        assert {p.dtype for p in network.parameters()} == {
            torch.bfloat16,
            torch.float32,
        }  # stand-ins for rates
        assert {p.dtype for p in network.problem.weights.values()} == {torch.bfloat16}
        tune(network, batch, batch, 2)
        assert {w.dtype for w in network.weights().values()} == {torch.bfloat16}


def test_the_network_can_be_evaluated_as_the_model():
    ridge = Ridge()
    network = LinearHypernetwork(ridge.problem)

    def measure(model, hyper):
        return {"error": (model(ridge.x_val)[:, 0] - ridge.y_val).square().mean() / 2}

    tuner = tune(network, ridge.train, ridge.val, 3, callbacks=[callbacks.Evaluate(measure)])
    with torch.no_grad():
        loss = network.problem.val_loss(network, ridge.hyper, ridge.val)
    assert float(tuner.history[-1]["error"]) == pytest.approx(float(loss))


@both
@pytest.mark.parametrize("mode", ["eval", "as_is"])
def test_modes_are_those_of_the_given_problem(kind, mode):
    model, decay, seen = nn.Linear(3, 1), Decays(3, 0.1), []

    def loss(model, hyper, batch):
        seen.append(model.training)
        return (hyper.log_decay * model.weight * model(batch)).mean()

    network = kind(br.Problem(model, decay, loss, loss, val_mode=mode))
    tune(network, torch.randn(4, 3), torch.randn(4, 3), 1)
    assert seen == [True, mode == "as_is"]


# --- perturbations that tune themselves ----------------------------------------------------------


def test_the_entropy_adds_its_share_to_the_gradient_of_the_scales():
    found = []
    for entropy in (0.0, 0.3):
        torch.manual_seed(0)
        ridge = Ridge(2)
        network = SelfTuning(ridge.problem, entropy=entropy)
        disturb(network)
        result = br.hypergradient(network.problem, ridge.train, ridge.val, br.Direct(), seed=1)
        found.append(result.total["log_scale"])
        assert torch.allclose(network.scales()["log_decay"], torch.tensor(0.5))
    assert torch.allclose(found[1] - found[0], torch.tensor(-0.3))
    assert bool(found[0].any())


def tune_scale(entropy, **arguments):
    """The scale after fifty steps at the bottom of a bowl in λ."""
    model, hyper = nn.Linear(1, 1), Decays(2, 0.0)

    def loss(model, hyper, batch):
        return (model(batch).square().mean() + hyper.log_decay.square().sum()) / 2

    network = SelfTuning(br.Problem(model, hyper, loss, loss), entropy=entropy, samples=4, **arguments)
    tune(network, torch.ones(1, 1), torch.ones(1, 1), 50)
    return network.scales()["log_decay"]


def test_entropy_widens_the_perturbations_that_curvature_narrows():
    # E L_V = σ²/2 − τ log σ for each λ has its minimum at σ = √τ.
    assert bool((tune_scale(0.0) < 0.25).all())
    assert bool((tune_scale(1.0) > 0.75).all())


def test_scales_are_held_in_their_bounds():
    assert torch.allclose(tune_scale(0.0, minimum=0.4), torch.tensor(0.4))
    assert torch.allclose(tune_scale(5.0, maximum=0.6), torch.tensor(0.6))


# --- runs ------------------------------------------------------------------------------------------


@both
def test_a_run_goes_on_bit_for_bit(kind, tmp_path):
    def make():
        torch.manual_seed(0)
        problem, train, val = zoo("convolutional")
        network = kind(problem)
        tuner = br.Tuner(
            network.problem,
            torch.optim.Adam(network.parameters(), 0.01),
            torch.optim.Adam(network.problem.hyperparameters.values(), 0.1),
            br.Direct(),
            weight_steps=2,
            callbacks=[network.recentre],
        )
        return network, tuner, [train], [val]

    network, tuner, train, val = make()
    tuner.fit(train, val, 3)
    tuner.save(tmp_path / "run")
    expected = tuner.fit(train, val, 3)
    other, resumed, train, val = make()
    torch.manual_seed(99)
    resumed.load(tmp_path / "run")
    history = resumed.fit(train, val, 3)
    assert [row["val_loss"] for row in history] == [row["val_loss"] for row in expected]
    assert all(torch.equal(x, other.state_dict()[n]) for n, x in network.state_dict().items())
    assert all(torch.equal(w, other.weights()[n]) for n, w in network.weights().items())
    assert not torch.equal(network.centre, kind(zoo("convolutional")[0]).centre)


@both
def test_runs_are_reproducible_by_seed(kind):
    def run(seed):
        torch.manual_seed(0)
        ridge = Ridge()
        torch.manual_seed(seed)
        tune(kind(ridge.problem), ridge.train, ridge.val, 5)
        return ridge.hyper.log_decay.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@both
def test_a_hypergradient_leaves_no_trace(kind):
    problem, train, val = zoo("convolutional")
    network = kind(problem)
    state = torch.get_rng_state()
    before = copy.deepcopy(network.state_dict())
    first, second = (br.hypergradient(network.problem, train, val, br.Direct()) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[n]) for n, x in network.state_dict().items())
    assert all(torch.equal(x, second.total[n]) for n, x in first.total.items())


@both
def test_other_methods_take_the_problem_as_well(kind):
    ridge = Ridge()
    network = kind(ridge.problem)
    for method in (br.Unrolled(2, 0.01), br.Implicit(br.Neumann(2, 0.01))):
        result = br.hypergradient(network.problem, ridge.train, ridge.val, method, seed=1)
        assert bool(result.indirect[next(iter(result.indirect))].any())


# --- what is refused ---------------------------------------------------------------------------------


def captured(which):
    """A problem one of whose losses uses an original beside its arguments."""
    model, decay = nn.Linear(3, 1), Decays(3, 0.1)
    model.plain = [model.weight]

    def fit(model, hyper, batch):
        return model(batch).square().mean() + (hyper.log_decay * model.weight).sum()

    wrong = {
        "model": lambda m, h, b: fit(m, h, b) + model.weight.sum(),
        "hyper": lambda m, h, b: fit(m, h, b) + decay.log_decay.sum(),
        "a plain list": lambda m, h, b: fit(m, h, b) + sum(w.square().sum() for w in m.plain),
    }[which]
    return model, decay, fit, wrong


@both
@pytest.mark.parametrize("which", ["model", "hyper", "a plain list"])
@pytest.mark.parametrize("loss", ["train_loss", "val_loss"])
def test_a_loss_that_uses_an_original_is_an_error(kind, which, loss):
    model, decay, fit, wrong = captured(which)
    network = kind(br.Problem(model, decay, *((wrong, fit) if loss == "train_loss" else (fit, wrong))))
    name = "hyper.log_decay" if which == "hyper" else "model.weight"
    for _ in range(2):
        with pytest.raises(br.Error, match=rf"{loss} must read .* used the original \['{name}'\]"):
            tune(network, torch.randn(4, 3), torch.randn(4, 3), 1)
    assert not any(p.requires_grad for p in network.parameters() if not p.numel())


@both
def test_a_hyperparameter_that_reaches_neither_loss_is_named(kind):
    ridge = Ridge()
    ridge.hyper.idle = nn.Parameter(torch.zeros(2))
    problem = br.Problem(ridge.model, ridge.hyper, ridge.problem.train_loss, ridge.problem.val_loss)
    network = kind(problem)
    with pytest.raises(br.Error, match=r"\['idle'\] reach neither"):
        tune(network, ridge.train, ridge.val, 1)

    def used(model, hyper, batch):
        return ridge.problem.val_loss(model, hyper, batch) + hyper.idle.square().sum()

    tune(
        kind(br.Problem(ridge.model, ridge.hyper, ridge.problem.train_loss, used)), ridge.train, ridge.val, 1
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: LinearHypernetwork(p.model), "must be a Problem; got Linear"),
        (lambda p: LinearHypernetwork(p, scale=0.0), "scale must be positive"),
        (lambda p: LinearHypernetwork(p, scale="wide"), "scale must be a number"),
        (lambda p: LinearHypernetwork(p, sampling="far"), 'sampling must be "local" or "global"'),
        (lambda p: LinearHypernetwork(p, samples=0), "samples must be an integer ≥ 1"),
        (
            lambda p: LinearHypernetwork(p, max_entries=7),
            r"max_entries=7; it would have 8 .*SelfTuning or Implicit",
        ),
        (lambda p: SelfTuning(p, scale=5.0), "scale must be from minimum=0.01 to a finite maximum=3.0"),
        (lambda p: SelfTuning(p, entropy=-1.0), "entropy must be ≥ 0"),
        (lambda p: SelfTuning(p, minimum=0.0), "minimum must be positive"),
        (lambda p: SelfTuning(p, max_entries=True), "max_entries must be an integer"),
        (lambda p: SelfTuning(Ridge(4).problem, max_entries=3), r"it would have 4 entries.*Use Implicit\(\)"),
        (
            lambda p: SelfTuning(p).weights({"decay": torch.zeros(1)}),
            r"among \{'log_decay': \[1\]\}; got 'decay'",
        ),
        (
            lambda p: LinearHypernetwork(p).weights({"log_decay": torch.zeros(())}),
            r"'log_decay' of shape \[\]",
        ),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(br.Error, match=words):
        make(Ridge().problem)


def test_models_that_cannot_be_copied_or_edit_their_weights_are_refused():
    decay = Decays(1, 0.0)

    def loss(model, hyper, batch):
        return hyper.log_decay.sum()

    odd = nn.Linear(2, 2)
    odd.kept = odd.weight * 2
    with pytest.raises(br.Error, match="copy.deepcopy"):
        SelfTuning(br.Problem(odd, decay, loss, loss))
    with pytest.raises(br.Error, match=r"without max_norm.*\['1'\]"):
        SelfTuning(br.Problem(nn.Sequential(nn.ReLU(), nn.Embedding(2, 2, max_norm=1.0)), decay, loss, loss))


def test_public_names_are_documented():
    for name in hypernetworks.__all__:
        assert getattr(hypernetworks, name).__doc__
