import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse.methods import rules
from bestresponse.methods.trajectory import Trajectory
from bestresponse.testing import check_method

RULES = {
    "SGD": (rules.SGD(), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (rules.SGD(0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "Nesterov": (
        rules.SGD(0.8, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    "dampening": (rules.SGD(0.9, 0.3), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3)),
    "Adam": (rules.Adam(), lambda p: torch.optim.Adam(p, 0.1)),
    "Adam with decay": (
        rules.Adam(0.8, 0.9, 1e-3, 0.05),
        lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.9), 1e-3, 0.05),
    ),
    "AdamW": (rules.AdamW(weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
}


@pytest.mark.parametrize("begun", [0, 20])
@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_torch(name, begun):
    """Fifty steps, the first of them by torch, whose state goes over and stays as it is."""
    rule, make = RULES[name]
    problem, train, _ = cases.network()
    optimizer = make(problem.weights.values())
    cases.train(problem, train, optimizer, begun)
    before = {k: {n: torch.as_tensor(x).clone() for n, x in s.items()} for k, s in optimizer.state.items()}
    with problem.undisturbed(weight_optimizer=optimizer) as passes:
        path = Trajectory(rule, 0.1, 50 - begun, passes, train, False)
        ours = path.run(path.start(), 0, 50 - begun).weights
    for parameter, state in before.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(optimizer.state[parameter][key]), value)
    cases.train(problem, train, optimizer, 50 - begun)
    for key, w in problem.weights.items():
        assert torch.allclose(ours[key], w, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", RULES)
def test_like_reads_the_settings(name):
    rule, make = RULES[name]
    found = rules.like(make([nn.Parameter(torch.zeros(1))]))
    assert type(found) is type(rule)
    assert found.settings() == rule.settings()


def test_like_refuses_what_a_rule_has_not():
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with pytest.raises(br.Error, match=r"got \['amsgrad'\]"):
        rules.like(torch.optim.Adam([p], amsgrad=True))
    with pytest.raises(br.Error, match=r"got \['decoupled_weight_decay'\]"):
        rules.like(torch.optim.Adam([p], decoupled_weight_decay=True))
    with pytest.raises(br.Error, match=r"different \['momentum'\]"):
        rules.like(torch.optim.SGD([{"params": [p]}, {"params": [q], "momentum": 0.5}], 0.1))
    with pytest.raises(br.Error, match="got RMSprop"):
        rules.like(torch.optim.RMSprop([p]))
    problem, train, val = cases.network()
    maximised = torch.optim.Adam(problem.weights.values(), maximize=True)
    with pytest.raises(br.Error, match=r"got \['maximize'\]"):
        br.hypergradient(
            problem, train, val, br.Unrolled(2, 0.1, rule=rules.Adam()), weight_optimizer=maximised
        )


class Tuned(nn.Module):
    """A decay, and settings of the optimiser: one for each tensor, one for each step, and scalars."""

    def __init__(self, model, steps):
        super().__init__()
        self.decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.05)
        self.log_rates = nn.ParameterDict(
            {
                n.replace(".", "_"): nn.Parameter(-1.5 + 0.3 * torch.randn(()))
                for n, _ in model.named_parameters()
            }
        )
        self.log_factors = nn.Parameter(0.2 * torch.randn(steps))
        self.logit = nn.Parameter(torch.tensor(0.5))
        self.log_decay = nn.Parameter(torch.tensor(-3.0))

    def rates(self):
        """A dict by weight for each step."""
        factors = self.log_factors.exp()
        named = {n.removeprefix("log_decay."): n for n, _ in self.decay.named_parameters()}
        return [{n: f * self.log_rates[n.replace(".", "_")].exp() for n in named} for f in factors]


STEPS = 4
TUNED_RULES = {
    "SGD": rules.SGD(weight_decay=lambda hyper: hyper.log_decay.exp()),
    "momentum": rules.SGD(lambda hyper: hyper.logit.sigmoid(), 0.2, weight_decay=lambda hyper: hyper.log_decay.exp()),
    "Nesterov": rules.SGD(lambda hyper: hyper.logit.sigmoid(), nesterov=True),
    "Adam": rules.Adam(lambda hyper: hyper.logit.sigmoid(), weight_decay=lambda hyper: hyper.log_decay.exp()),
    "Adam's memory": rules.Adam(0.8, lambda hyper: hyper.logit.sigmoid(), lambda hyper: hyper.log_decay.exp()),
    "AdamW": rules.AdamW(lambda hyper: hyper.logit.sigmoid(), 0.95, weight_decay=lambda h: h.log_decay.exp()),
}  # fmt: skip


def tuned_problem(rule):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    hyper = Tuned(model, STEPS)
    unused = {"SGD": ["logit"], "Nesterov": ["log_decay"]}.get(rule, [])
    for name in unused:
        getattr(hyper, name).requires_grad_(False)

    def train_loss(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + hyper.decay(model)

    def val_loss(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * hyper.log_factors.square().sum()

    train, val = ((torch.randn(n, 3), torch.randint(2, (n,))) for n in (12, 10))
    return br.Problem(model, hyper, train_loss, val_loss), train, val


def val_loss_after(problem, train, val, method, optimizer):
    """The validation loss after the very steps, which `test_rules_are_those_of_torch` compares with torch's."""
    with problem.undisturbed(None, optimizer, twice=False) as passes:
        path = Trajectory(method.rule, method.step_size, method.steps, passes, train, method.fresh_batches)
        end = path.run(path.start(), 0, method.steps)
        passes.carry(end.buffers)
        return float(passes.val_loss(val, end.as_leaves().weights).detach())


def differences(problem, train, val, method, optimizer=None):
    """The hypergradient by central differences of fourth order of the validation loss after the very steps."""
    gradient = {n: torch.zeros_like(p) for n, p in problem.hyperparameters.items()}
    step = 1e-3
    for name, parameter in problem.hyperparameters.items():
        flat = parameter.detach().view(-1)
        for index in range(flat.numel()):
            kept = flat[index].clone()
            for shift, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                flat[index] = kept + shift * step
                value = val_loss_after(problem, train, val, method, optimizer)
                gradient[name].view(-1)[index] += factor * value / (12 * step)
            flat[index] = kept
    return gradient


@pytest.mark.parametrize(
    ("rule", "begun"),
    [
        ("SGD", 0),
        ("momentum", 3),
        ("Nesterov", 0),
        ("Nesterov", 3),
        ("Adam", 0),
        ("Adam's memory", 3),
        ("AdamW", 3),
    ],
)
def test_every_setting_against_differences_of_the_training_map(rule, begun):
    """Reverse, recomputed and forward mode; rates for each tensor and step, momentum, decay; with a state or none."""
    problem, train, val = tuned_problem(rule)
    rates = lambda hyper: hyper.rates()  # noqa: E731
    chosen = TUNED_RULES[rule]
    kind = {rules.SGD: torch.optim.SGD, rules.Adam: torch.optim.Adam, rules.AdamW: torch.optim.AdamW}[
        type(chosen)
    ]
    optimizer = kind(problem.weights.values(), 0.05, **({"momentum": 0.5} if kind is torch.optim.SGD else {}))
    cases.train(problem, train, optimizer, begun)
    unrolled = br.Unrolled(STEPS, rates, rule=chosen)
    expected = differences(problem, train, val, unrolled, optimizer)
    results = {}
    for name, method in {
        "full": unrolled,
        "recomputed": br.Unrolled(STEPS, rates, rule=chosen, checkpoint_every=3),
        "each step": br.Unrolled(STEPS, rates, rule=chosen, checkpoint_every=1),
        "forward": br.Forward(STEPS, rates, rule=chosen),
        "in chunks": br.Forward(STEPS, rates, rule=chosen, chunk=4),
    }.items():
        results[name] = br.hypergradient(problem, train, val, method, weight_optimizer=optimizer)
    for name, h in results.items():
        assert h.val_loss == results["full"].val_loss
        for key, value in expected.items():
            scale = float(max(x.abs().max() for x in expected.values()))
            assert torch.allclose(h.total[key], value, rtol=1e-6, atol=1e-8 * scale), (name, key)
            same = results["full"].total[key]
            assert torch.allclose(h.total[key], same, rtol=1e-11, atol=1e-14 * scale), (name, key)


@pytest.mark.parametrize("rule", ["momentum", "Adam", "AdamW"])
def test_truncated_unrolling_is_unrolling_from_where_the_first_steps_end(rule):
    problem, train, val = cases.network()
    chosen, make = RULES[rule]
    truncated = br.hypergradient(problem, train, val, br.Unrolled(7, 0.1, last=3, rule=chosen))
    optimizer = make(problem.weights.values())
    cases.train(problem, train, optimizer, 4)
    later = br.hypergradient(
        problem, train, val, br.Unrolled(3, 0.1, rule=chosen), weight_optimizer=optimizer
    )
    again = br.Unrolled(7, 0.1, last=3, rule=chosen, checkpoint_every=2)
    for name in later.total:
        assert torch.allclose(truncated.total[name], later.total[name], rtol=1e-10, atol=1e-15)
    trained_on = br.hypergradient(problem, train, val, again)
    assert not torch.allclose(trained_on.total[name], later.total[name], rtol=1e-3)


@pytest.mark.parametrize("checkpoint_every", [None, 1, 2, 5, 9])
def test_recomputation_changes_nothing(checkpoint_every):
    problem, train, val = cases.network(nn.Dropout(0.4))
    full = br.hypergradient(problem, train, val, br.Unrolled(7, 0.3, last=5), seed=3)
    method = br.Unrolled(7, 0.3, last=5, checkpoint_every=checkpoint_every)
    check_method(method, problem, train, val)
    h = br.hypergradient(problem, train, val, method, seed=3)
    for name in full.total:
        assert torch.allclose(h.total[name], full.total[name], rtol=1e-12, atol=1e-17)


class Line(nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(values))


def straight():
    """Weights on a straight line, with a mixed term that grows along it: x₀ falls by α a step, and x₁ stays at zero."""

    def train_loss(model, hyper, batch):
        x, (slope, coupling) = model.x, hyper.x
        return slope * x[0] + coupling * x[0] * x[1] + x[1].square()

    def val_loss(model, hyper, batch):
        return model.x[0].square() + (model.x[1] - 1.0).square()

    return br.Problem(Line(2.0, 0.0), Line(1.0, 0.0), train_loss, val_loss)


@pytest.mark.parametrize("last", [None, 4])
def test_interpolation_is_exact_on_a_straight_line(last):
    problem = straight()
    exact = br.hypergradient(problem, None, None, br.Unrolled(9, 0.05, last=last))
    method = br.Unrolled(9, 0.05, last=last, trajectory="interpolated")
    check_method(method, problem, None, None, exact.total, 1e-13)
    assert exact.val_loss == br.hypergradient(problem, None, None, method).val_loss
    assert abs(float(exact.total["x"][1])) > 0.1


@pytest.mark.parametrize("rule", [rules.SGD(), rules.SGD(0.5), rules.Adam()], ids=["SGD", "momentum", "Adam"])
def test_interpolation_is_near_elsewhere(rule):
    problem, train, val = cases.network()
    exact, near = (
        br.hypergradient(problem, train, val, br.Unrolled(8, 0.02, rule=rule, trajectory=kind)).total
        for kind in ("exact", "interpolated")
    )
    one, other = (torch.cat([x.view(-1) for x in h.values()]) for h in (exact, near))
    assert 1e-9 < 1.0 - float(F.cosine_similarity(one, other, dim=0)) < 0.05


def two_batches():
    problem, one, val = cases.network()
    other = (torch.randn(9, 3), torch.randint(2, (9,)))
    return problem, br.Batches([one, other], weights=[3, 1]), val


@pytest.mark.parametrize("make", [br.Unrolled, br.Forward])
def test_a_fresh_batch_for_each_step(make):
    """Step k takes batch k mod n, with the weight that makes a round of steps one of the mean."""
    problem, batches, val = two_batches()
    start = {n: w.detach().clone() for n, w in problem.weights.items()}
    h = br.hypergradient(problem, batches, val, make(5, 0.2, fresh_batches=True))
    optimizer = torch.optim.SGD(problem.weights.values(), 0.2)
    for k in range(5):
        optimizer.zero_grad()
        loss = problem.train_loss(problem.model, problem.hyper, batches.batches[k % 2])
        (loss * (1.5, 0.5)[k % 2]).backward(inputs=list(problem.weights.values()))
        optimizer.step()
    assert h.val_loss == pytest.approx(
        float(problem.val_loss(problem.model, problem.hyper, val).detach()), rel=1e-12
    )
    with torch.no_grad():
        for name, w in problem.weights.items():
            w.copy_(start[name])
    together = br.hypergradient(problem, batches, val, make(5, 0.2))
    assert together.val_loss != pytest.approx(h.val_loss, rel=1e-6)
    parameter = problem.hyperparameters["log_decay.0.weight"].detach().view(-1)
    values = []
    for shift in (1e-4, -2e-4):
        parameter[3] += shift
        values.append(br.hypergradient(problem, batches, val, make(5, 0.2, fresh_batches=True)).val_loss)
    parameter[3] += 1e-4
    assert h.total["log_decay.0.weight"].view(-1)[3].item() == pytest.approx(
        (values[0] - values[1]) / 2e-4, rel=1e-5
    )


def test_fresh_batches_have_masks_of_their_own():
    problem, train, val = cases.network(nn.Dropout(0.5))
    twice = br.Batches([train, train])
    h = [
        br.hypergradient(problem, x, val, br.Unrolled(2, 0.5, fresh_batches=True), seed=1)
        for x in (twice, twice)
    ]
    assert h[0].val_loss == h[1].val_loss
    same = br.hypergradient(problem, train, val, br.Unrolled(2, 0.5), seed=1)
    assert h[0].val_loss != same.val_loss


def test_the_tuner_hands_on_the_state_of_its_optimiser():
    problem, train, val = cases.network()
    optimizer = torch.optim.Adam(problem.weights.values(), 0.05)
    method = br.Unrolled(3, 0.05, rule=rules.Adam())
    still = torch.optim.SGD(problem.hyperparameters.values(), 0.0)
    tuner = br.Tuner(problem, optimizer, still, method, weight_steps=4)
    row = tuner.fit([train], [val], 1)[0]
    begun = br.hypergradient(problem, train, val, method, weight_optimizer=optimizer)
    fresh = br.hypergradient(problem, train, val, method)
    other = br.hypergradient(
        problem, train, val, method, weight_optimizer=torch.optim.AdamW(problem.weights.values(), 0.05)
    )
    assert row["val_loss"] == begun.val_loss != fresh.val_loss
    assert other.val_loss == fresh.val_loss  # a state of another class is not used


def test_adam_is_finite_where_gradients_are_zero():
    """A unit that never fires has a gradient of zero, at which the root in Adam has no derivative."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias[1] = -100.0
    rates = nn.ParameterDict({"log_rate": torch.tensor(-2.0)})

    def loss(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    train = (torch.randn(12, 3), torch.randint(2, (12,)))
    problem = br.Problem(model, rates, loss, loss)
    method = br.Unrolled(4, lambda hyper: hyper["log_rate"].exp(), rule=rules.Adam())
    expected = differences(problem, train, train, method)
    check_method(method, problem, train, train, expected, 1e-6)


@pytest.mark.filterwarnings("ignore:train_loss does not reach the weights \\['idle'\\]")
def test_weights_that_no_step_moves():
    """They have no gradient; those that the validation loss reads still count there."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.moving, self.idle = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor(3.0))

    def train_loss(model, hyper, batch):
        return (hyper["a"] * model.moving.square()).sum()

    def val_loss(model, hyper, batch):
        return (model.moving * model.idle).sum()

    problem = br.Problem(Two(), nn.ParameterDict({"a": torch.tensor([0.5, 0.7])}), train_loss, val_loss)
    for rule in (rules.SGD(), rules.SGD(0.5), rules.Adam()):
        results = [
            br.hypergradient(problem, None, None, method).total["a"]
            for method in (
                br.Unrolled(4, 0.1, rule=rule),
                br.Unrolled(4, 0.1, rule=rule, checkpoint_every=1),
                br.Forward(4, 0.1, rule=rule),
            )
        ]
        expected = differences(problem, None, None, br.Unrolled(4, 0.1, rule=rule))["a"]
        for total in results:
            assert torch.allclose(total, expected, rtol=1e-7)


def test_modules_and_weights_that_are_registered_twice():
    """Tied weights are one weight in all of their places, and every place is put back."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.again, self.other = self.first, nn.Linear(3, 3)
            self.other.weight = self.first.weight

        def forward(self, x):
            return self.other(self.again(self.first(x).tanh()).tanh())

    model = Tied()
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    fit = lambda model, decay, batch: model(batch).square().mean()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    x = torch.randn(5, 3)
    method = br.Unrolled(3, 0.2)
    check_method(method, problem, x, x, differences(problem, x, x, method), 1e-6)
    problem.check_intact()
    assert model.other.weight is model.first.weight is problem.weights["first.weight"]


def test_the_buffers_move_along_with_the_steps():
    """The validation loss is that after the steps, with the running statistics that they left."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    decay = br.hyperparameters.WeightDecay(model, initial=0.05)
    fit = lambda model, decay, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = ((torch.randn(n, 3) + 1, torch.randint(2, (n,))) for n in (12, 10))
    methods = (
        br.Unrolled(6, 0.2),
        br.Unrolled(6, 0.2, checkpoint_every=2),
        br.Unrolled(6, 0.2, trajectory="interpolated"),
    )
    found = [br.hypergradient(problem, train, val, method) for method in methods]
    refused = ""
    try:
        found.append(br.hypergradient(problem, train, val, br.Forward(6, 0.2, chunk=20)))
    except br.errors.SecondDerivativeError as error:
        refused = str(error)  # batch norm has no third derivative since torch 2.14
    assert ("batch_norm does not support 3rd" in refused) == (len(found) == 3)
    cases.train(problem, train, torch.optim.SGD(problem.weights.values(), 0.2), 6)
    with torch.no_grad():
        model.eval()
        expected = float(fit(model, decay, val))
    assert [h.val_loss for h in found] == pytest.approx([expected] * len(found), rel=1e-12)
    for h in (found[1], *found[3:]):
        assert torch.allclose(h.total["log_decay.0.weight"], found[0].total["log_decay.0.weight"], rtol=1e-9)


def test_every_chunk_of_forward_mode_begins_with_the_same_buffers():
    """A training loss that grows with the passes that the model has seen, as with the state that an LSTM carries."""
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.zeros(()))
    x, hyper = torch.randn(4, 3), nn.ParameterDict({"a": torch.tensor([0.1, 0.2, 0.3])})

    def train_loss(model, hyper, batch):
        model.seen = model.seen + 1
        return (1 + model.seen) * (model(x) - 1).square().mean() + (hyper["a"] * model.weight.square()).sum()

    problem = br.Problem(model, hyper, train_loss, lambda m, h, b: m(x).square().mean())
    unrolled = br.hypergradient(problem, None, None, br.Unrolled(3, 0.02)).total["a"]
    for chunk in (None, 2, 1):
        forward = br.hypergradient(problem, None, None, br.Forward(3, 0.02, chunk=chunk)).total["a"]
        assert torch.allclose(forward, unrolled, rtol=1e-10)
    assert float(model.seen) == 0


def test_a_batch_that_does_not_reach_every_weight():
    """Its step is not counted for the others, as in torch."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def loss(model, hyper, batch):
        return sum((hyper["s"] * getattr(model, name).square()).sum() for name in batch)

    for rule, make in (RULES["Adam"], RULES["AdamW"], RULES["dampening"]):
        problem = br.Problem(Two(), nn.ParameterDict({"s": torch.tensor(0.7)}), loss, loss)
        batches = br.Batches(["a", "ab", "ab"])
        methods = [
            br.Unrolled(5, 0.1, rule=rule, fresh_batches=True, **more)
            for more in ({}, {"checkpoint_every": 2})
        ]
        h = [br.hypergradient(problem, batches, "ab", method) for method in methods]
        optimizer = make(problem.weights.values())
        for k in range(5):
            optimizer.zero_grad()
            loss(problem.model, problem.hyper, batches.batches[k % 3]).backward(
                inputs=[getattr(problem.model, name) for name in batches.batches[k % 3]]
            )
            optimizer.step()
        after = float(loss(problem.model, problem.hyper, "ab").detach())
        assert [x.val_loss for x in h] == pytest.approx([after] * 2, rel=1e-10)


class Third(torch.autograd.Function):
    """A square with a second derivative and no third."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return Twice.apply(ctx.saved_tensors[0], grad)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad):
        ctx.save_for_backward(x, grad)
        return 2 * x * grad

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, again):
        x, grad = ctx.saved_tensors
        return 2 * grad * again, 2 * x * again


def test_forward_refuses_what_has_no_third_derivative():
    model = nn.Linear(3, 1)
    x = torch.randn(6, 3)

    def train_loss(model, hyper, batch):
        return Third.apply(model(x)).mean() + hyper["a"].exp() * model.weight.square().sum()

    def val_loss(model, hyper, batch):
        return (model(x) - 1).square().mean()

    problem = br.Problem(model, nn.ParameterDict({"a": torch.tensor(-1.0)}), train_loss, val_loss)
    method = br.Unrolled(3, 0.1)
    check_method(method, problem, None, None, differences(problem, None, None, method), 1e-6)
    with pytest.raises(br.Error, match=r"third derivative.*Use Unrolled"):
        br.hypergradient(problem, None, None, br.Forward(3, 0.1))


def test_steps_that_diverge_are_told_and_can_be_skipped():
    problem, train, val = cases.network()
    method = br.Unrolled(400, 1e4)
    with pytest.raises(br.errors.DivergedError, match=r"step \d+ of 400 led to.*smaller step_size"):
        br.hypergradient(problem, train, val, method)
    weights, hyper = (torch.optim.SGD(p.values(), 0.1) for p in (problem.weights, problem.hyperparameters))
    with pytest.warns(br.BestResponseWarning, match="hyper-step 1 is skipped"):
        rows = br.Tuner(problem, weights, hyper, method, policy="skip").fit([train], [val], 2)
    assert [row["stepped"] for row in rows] == [False, False]
    with pytest.raises(br.errors.DivergedError):
        br.Tuner(problem, weights, hyper, method).fit([train], [val], 1)


def test_look_ahead_refuses_embeddings_that_edit_themselves():
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 1))
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    fit = lambda model, decay, batch: model(batch).square().mean()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    x = torch.randint(5, (4, 2))
    methods = (br.Unrolled(2, 0.1), br.Forward(2, 0.1), br.Penalty(2, 0.1), br.SAMA(rules.SGD()))
    for method in (*methods, br.Implicit(curvature=br.FiniteDifference())):
        with pytest.raises(br.Error, match="embeddings without max_norm"):
            br.hypergradient(problem, x, x, method)


def test_forward_takes_hyperparameters_of_any_layout():
    values = torch.randn(2, 3)
    for hyper in (nn.Parameter(values.T), nn.Parameter(values[:0]), nn.Parameter(values.T.expand(3, 2))):
        model = nn.Linear(3, 2)

        def train_loss(model, hyper, batch):
            x = hyper["x"].reshape(-1, 3) if hyper["x"].numel() else torch.ones(2, 3)
            return model(x).square().mean() + 0 * hyper["x"].sum()

        problem = br.Problem(
            model, nn.ParameterDict({"x": hyper}), train_loss, lambda m, h, b: m.weight.sum().square()
        )
        totals = [
            br.hypergradient(problem, None, None, make(3, 0.2)).total["x"]
            for make in (br.Unrolled, br.Forward)
        ]
        assert torch.allclose(totals[0], totals[1], rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_of_another_precision_than_the_weights(dtype):
    model = nn.Linear(3, 2).to(dtype)
    hyper = nn.ParameterDict({"log_rate": torch.tensor(-2.0, dtype=torch.float64)})
    x = torch.randn(4, 3, dtype=dtype)
    loss = lambda model, hyper, batch: model(x).square().mean()  # noqa: E731
    problem = br.Problem(model, hyper, loss, loss)
    rates = lambda hyper: {n: hyper["log_rate"].exp().expand(w.shape) for n, w in problem.weights.items()}  # noqa: E731
    for method in (
        br.Unrolled(3, rates, rule=rules.Adam()),
        br.Unrolled(3, rates, trajectory="interpolated"),
        br.Forward(3, rates),
    ):
        h = br.hypergradient(problem, None, None, method)
        assert h.total["log_rate"].dtype == torch.float64
        assert float(h.total["log_rate"]) != 0


def test_spectral_norm_is_warned_of_and_left_as_it_was():
    model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    decay = br.hyperparameters.WeightDecay(model, initial=0.1)
    fit = lambda model, decay, batch: model(batch).square().mean()  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    x = torch.randn(4, 3)
    model(x)
    before = model[0].weight
    with pytest.warns(br.BestResponseWarning, match="SAMA and Penalty include that part"):
        br.hypergradient(problem, x, x, br.Unrolled(2, 0.1))
    assert model[0].weight is before


def test_a_rule_must_return_weight_and_moments():
    class Bare(rules.Rule):
        moments = ()

        def update(self, w, g, moments, step, s):
            return w - s["step_size"] * g

    problem, train, val = cases.network()
    for method in (br.Unrolled(2, 0.1, rule=Bare()), br.SAMA(Bare())):
        with pytest.raises(br.Error, match=r"Bare.update must return a tuple.*got Tensor"):
            br.hypergradient(problem, train, val, method)


def test_a_graph_that_is_kept_between_calls_is_told():
    kept = []

    def rate(hyper):
        kept[:] = kept or [(hyper.log_decay.get_parameter("0.weight").square().sum() * 0 + 0.1)]
        return kept[0]

    problem, train, val = cases.network()
    br.hypergradient(problem, train, val, br.Unrolled(2, rate))
    kept[0].sum().backward()
    with pytest.raises(br.Error, match="keeps a tensor with the graph of an earlier pass"):
        br.hypergradient(problem, train, val, br.Unrolled(2, rate))


def test_what_does_not_reach_the_weights_is_told():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(0.2))

    x = torch.randn(4, 3)
    fit = lambda model, hyper, batch: model(x).square().mean()  # noqa: E731
    loss = lambda m, h, b: fit(m, h, b) + h.a * m.weight.square().sum() + h.b  # noqa: E731
    for method in (br.Unrolled(2, 0.1), br.Forward(2, 0.1)):
        problem = br.Problem(nn.Linear(3, 1), Idle(), loss, fit)
        with pytest.warns(br.BestResponseWarning, match=r"\['b'\] reach train_loss, but not its gradient"):
            br.hypergradient(problem, None, None, method)
    for method in (br.Unrolled(2, 0.1), br.Forward(2, 0.1), br.Penalty(2, 0.1)):
        problem = br.Problem(nn.Linear(3, 1), Idle(), lambda m, h, b: h.a.square() + h.b, fit)
        with pytest.raises(br.Error, match="train_loss must depend on a weight"):
            br.hypergradient(problem, None, None, method)


def test_implicit_refuses_settings_of_the_optimiser():
    problem, train, val = tuned_problem("Adam")
    loss = lambda model, hyper, batch: model(batch[0]).square().mean()  # noqa: E731
    unseen = br.Problem(problem.model, problem.hyper, problem.train_loss, loss)
    message = r"log_factors.*best response.*Unrolled or Forward.*step_size and rule"
    with pytest.raises(br.Error, match=message):
        br.hypergradient(unseen, train, val, br.Implicit())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Unrolled(3, 0.1, checkpoint_every=0), "Unrolled.checkpoint_every"),
        (lambda: br.Unrolled(3, 0.1, trajectory="straight"), "Unrolled.trajectory"),
        (lambda: br.Unrolled(3, 0.1, trajectory="interpolated", checkpoint_every=2), "no checkpoints"),
        (lambda: br.Unrolled(3, 0.1, rule=torch.optim.SGD), "Unrolled.rule must be an update rule"),
        (lambda: br.Forward(0, 0.1), "Forward.steps"),
        (lambda: br.Forward(2, -0.1), "Forward.step_size"),
        (lambda: br.Forward(2, 0.1, chunk=0), "Forward.chunk"),
        (lambda: br.Unrolled(3, torch.tensor(0.1)), "a function of hyper that returns a tensor"),
        (lambda: br.Unrolled(3, 0.1, fresh_batches="yes"), "Unrolled.fresh_batches must be True or False"),
        (lambda: rules.SGD(nesterov=True), "SGD.nesterov needs momentum and no dampening"),
        (lambda: rules.SGD(0.9, 0.1, nesterov=True), "SGD.nesterov needs momentum and no dampening"),
        (lambda: rules.SGD(0.9, nesterov="no"), "SGD.nesterov must be True or False"),
        (lambda: rules.SGD(1.0), "SGD.momentum"),
        (lambda: rules.SGD(torch.tensor(0.5)), "SGD.momentum must be a number"),
        (lambda: rules.Adam(beta2=1.2), "Adam.beta2"),
        (lambda: rules.AdamW(weight_decay=-1.0), "AdamW.weight_decay"),
    ],
)
def test_arguments(make, message):
    with pytest.raises(br.Error, match=message):
        make()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (lambda h: torch.ones(3), r"shape \[4\] with a value for each step"),
        (lambda h: {"0.weight": torch.ones(())}, "a dict with a tensor for each weight.*got a dict"),
        (lambda h: [torch.ones(())] * 3, "a sequence of those.*got a list"),
        (lambda h: [[torch.ones(())] * 4] * 4, "step_size must return"),
        (lambda h: torch.tensor([0.1, 0.1, 0.0, 0.1]), "positive and finite"),
        (lambda h: torch.tensor(torch.nan), "positive and finite"),
        (lambda h: 0.1, "must return a scalar tensor"),
    ],
)
def test_what_a_setting_may_return(setting, message):
    problem, train, val = cases.network()
    with pytest.raises(br.Error, match=message):
        br.hypergradient(problem, train, val, br.Unrolled(4, setting))


def test_a_setting_by_weight_must_fit():
    problem, train, val = cases.network()
    wrong = lambda h: {n: torch.ones(7) for n in problem.weights}  # noqa: E731
    with pytest.raises(br.Error, match=r"broadcast.*\[7\].*0\.weight"):
        br.hypergradient(problem, train, val, br.Unrolled(2, wrong))
    # A tensor for a weight of as many entries as there are steps is one for the weight.
    method = br.Unrolled(4, lambda h: {n: torch.full(w.shape, 0.1) for n, w in problem.weights.items()})
    same = br.hypergradient(problem, train, val, br.Unrolled(4, 0.1))
    assert br.hypergradient(problem, train, val, method).val_loss == pytest.approx(same.val_loss, rel=1e-14)
