"""`Folds`: one problem over K copies of the weights, against the dense answer and against folds on their own."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse.cross_validation import Minimise, fold_batches
from bestresponse.diagnostics import measuring

SIZES = {"equal": (12, 12, 12), "by one": (12, 12, 13), "all different": (12, 13, 14)}


def squared_error(model, hyper, batch):
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def decayed(model, hyper, batch):
    return squared_error(model, hyper, batch) + hyper(model)


def batches(sizes, features=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (torch.randn(n, features, generator=generator), torch.randn(n, generator=generator)) for n in sizes
    )


def scatter(problem, seed=2):
    """Different weights for each fold."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in problem.weights.values():
            w.add_(0.3 * torch.randn(w.shape, generator=generator))


def network(initial=0.3, sizes=SIZES["equal"], batched=True, trained=False, **settings):
    """A small network with a decay for each tensor, its training and its validation batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=initial)
    problem = br.Folds(model, decay, decayed, squared_error, len(sizes), batched=batched, **settings)
    scatter(problem)
    train, val = batches(sizes), batches((5, 5, 5), seed=3)
    if trained:
        Minimise(tolerance=1e-15)(problem, train)
    return problem, train, val


SPLIT = (
    lambda model, hyper, batch: model(batch[0])[:, 0],
    lambda outputs, batch: F.mse_loss(outputs, batch[1]),
    lambda model, hyper, batch: hyper(model),
)
METHODS = {
    "exact": br.Implicit(br.Exact()),
    "cg": br.Implicit(br.ConjugateGradient(30, tolerance=1e-12)),
    "damped cg": br.Implicit(br.ConjugateGradient(5, damping=0.2)),
    "diagonal": br.Implicit(br.ConjugateGradient(3, damping=0.2, diagonal=True)),
    "minres": br.Implicit(br.MINRES(30, tolerance=1e-12)),
    "neumann": br.Implicit(br.Neumann(6)),
    "identity": br.Implicit(br.Identity()),
    "differences": br.Implicit(br.Exact(), br.FiniteDifference()),
    "gauss-newton": br.Implicit(br.Exact(), br.GaussNewton(*SPLIT)),
    "kfac": br.Implicit(br.ConjugateGradient(4, preconditioner=br.KFAC(*SPLIT)), br.GaussNewton(*SPLIT)),
    "fisher": br.Implicit(
        br.Exact(),
        br.EmpiricalFisher(
            lambda model, hyper, batch: (model(batch[0])[:, 0] - batch[1]).square(),
            lambda model, hyper, batch: hyper(model),
        ),
    ),
    "unrolled": br.Unrolled(4, 0.1, rule=br.rules.SGD(momentum=0.5)),
    "adam": br.Unrolled(3, 0.05, rule=br.rules.Adam()),
    "forward": br.Forward(4, 0.1),
    "penalty": br.Penalty(8, 0.1),
    "sama": br.SAMA(br.rules.SGD()),
    "direct": br.Direct(),
}


BATCHED = (
    "exact",
    "cg",
    "damped cg",
    "diagonal",
    "minres",
    "neumann",
    "identity",
    "unrolled",
    "adam",
    "direct",
)


def alone(problem, train, val, method):
    """The sum of the hypergradients of plain problems, one for each fold, with 1/K of the validation loss."""

    def share(model, hyper, batch):
        return squared_error(model, hyper, batch) / len(problem.folds)

    results = []
    for fold, t, v in zip(problem.folds, train, val, strict=True):
        single = br.Problem(fold.model, problem.hyper, decayed, share)
        results.append(br.hypergradient(single, t, v, method))
    total = {n: sum(r.total[n] for r in results) for n in results[0].total}
    return total, sum(r.val_loss for r in results)


def assert_near(one, other, tolerance=1e-9):
    size = max(float(x.abs().max()) for x in other.values())
    for name, x in other.items():
        torch.testing.assert_close(one[name], x, rtol=tolerance, atol=tolerance * size)


# Other methods run the folds in turn in any case.
BOTH_WAYS = [(name, batched) for name in METHODS for batched in (True, False) if batched or name in BATCHED]


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("name", "batched"), BOTH_WAYS)
def test_the_hypergradient_is_the_mean_of_those_of_the_folds(name, sizes, batched):
    problem, train, val = network(sizes=SIZES[sizes], batched=batched)
    method = METHODS[name]
    expected, val_loss = alone(problem, train, val, method)
    found = br.hypergradient(problem, train, val, method)
    # Differences of gradients depend on rounding.
    assert_near(found.total, expected, 1e-5 if name == "differences" else 1e-9)
    assert found.val_loss == pytest.approx(val_loss)
    if name in BATCHED:
        assert problem.batched is {"all different": None if batched else False}.get(sizes, batched)


@pytest.mark.parametrize("initial", [0.05, 0.5])
@pytest.mark.parametrize("sizes", ["by one", "all different"])
def test_the_hypergradient_is_the_slope_of_the_cross_validated_loss(sizes, initial):
    """Train again on both sides of each decay, in two sizes of the penalty."""
    problem, train, val = network(initial, SIZES[sizes], trained=True)
    methods = [METHODS[name] for name in ("exact", "cg", "minres", "differences")]
    found = [br.hypergradient(problem, train, val, method).total for method in methods]
    again = Minimise(tolerance=1e-15)
    for name, parameter in problem.hyperparameters.items():
        values = []
        for step in (1e-3, -2e-3):
            with torch.no_grad():
                parameter.add_(step)
            again(problem, train)
            values.append(float(problem.losses(val, "val_loss").mean().detach()))
        with torch.no_grad():
            parameter.add_(1e-3)
        for total in found:
            size = max(float(x.abs()) for x in total.values())
            slope = (values[0] - values[1]) / 2e-3
            assert float(total[name]) == pytest.approx(slope, rel=1e-3, abs=1e-3 * size)


@pytest.mark.parametrize("name", ["exact", "damped cg", "diagonal", "neumann", "unrolled", "direct"])
@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_batched_folds_give_the_numbers_of_folds_in_turn(name):
    results = []
    for batched in (True, False):
        problem, train, val = network(sizes=SIZES["by one"], batched=batched)
        found = br.hypergradient(problem, train, val, METHODS[name])
        assert problem.batched is batched
        results.append((found, problem.state(METHODS[name])))
    (one, kept), (other, kept_in_turn) = results
    assert_near(one.total, other.total, 1e-11)
    assert_near(one.direct, other.direct, 1e-11)
    if one.solve is not None:
        assert (one.solve.status, one.solve.products) == (other.solve.status, other.solve.products)
    assert kept.memory.keys() == kept_in_turn.memory.keys()


@pytest.mark.parametrize("batched", [True, False])
def test_each_fold_keeps_its_own_start_and_coefficients(batched):
    problem, train, val = network(batched=batched, trained=True)
    method = br.Implicit(br.ConjugateGradient(2, recycle=2, damping=0.1), warm_start=True)
    singles = [br.Problem(f.model, problem.hyper, decayed, squared_error) for f in problem.folds]
    for _ in range(3):
        found = br.hypergradient(problem, train, val, method)
        own = [br.hypergradient(p, t, v, method) for p, t, v in zip(singles, train, val, strict=True)]
        assert_near(found.total, {n: sum(h.total[n] for h in own) / 3 for n in found.total})
    state = problem.state(method)
    assert found.solve.warm
    assert state.solution.keys() == problem.weights.keys()
    assert_near(
        state.solution,
        {f"fold{k}.{n}": x / 3 for k, p in enumerate(singles) for n, x in p.state(method).solution.items()},
    )
    problem.forget(method)
    assert problem.state(method).solution is None


def test_weight_steps_are_those_of_the_folds_alone():
    runs = []
    for batched in (True, False):
        problem, train, val = network(sizes=SIZES["by one"], batched=batched)
        optimizer = torch.optim.Adam(problem.weights.values(), 0.1)
        still = torch.optim.SGD(problem.hyperparameters.values(), 0.0)
        tuner = br.Tuner(problem, optimizer, still, br.Direct())
        lone = copy.deepcopy(problem.folds[2].model)
        tuner.fit([train], [val], 4)
        runs.append(problem)
    steps = torch.optim.Adam(lone.parameters(), 0.1)
    for _ in range(4):
        steps.zero_grad()
        decayed(lone, problem.hyper, train[2]).backward(inputs=list(lone.parameters()))
        steps.step()
    for one, other, x in zip(
        runs[0].folds[2].weights.values(), runs[1].folds[2].weights.values(), lone.parameters(), strict=True
    ):
        torch.testing.assert_close(one, x)
        torch.testing.assert_close(other, x)


@pytest.mark.parametrize("sizes", SIZES)
def test_tuner_looks_ahead_from_the_moments_of_each_fold(sizes):
    runs = []
    for batched in (True, False):
        problem, train, val = network(sizes=SIZES[sizes], batched=batched)
        optimizer = torch.optim.SGD(problem.weights.values(), 0.05, momentum=0.9)
        method = br.Unrolled(3, 0.05, rule=br.rules.SGD(momentum=0.9))
        tuner = br.Tuner(problem, optimizer, torch.optim.SGD(problem.hyper.parameters(), 1.0), method)
        runs.append(tuner.fit([train], [val], 4))
    for one, other in zip(*runs, strict=True):
        assert one["hypergradient_norm"] == pytest.approx(other["hypergradient_norm"], rel=1e-9)
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-9)


class Dropping(nn.Module):
    """A model whose tuned dropout rate is inside it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.tuned = nn.ModuleDict({"drop": br.hyperparameters.ConcreteDropout()})

    def forward(self, x):
        return self.last(self.tuned["drop"](self.first(x).relu()))


def test_folds_share_hyperparameters_inside_the_model():
    model = Dropping()
    problem = br.Folds(model, model.tuned, squared_error, squared_error, 3)
    assert all(fold.model.tuned is model.tuned for fold in problem.folds)
    assert all("tuned" not in name for name in problem.weights)
    assert len(problem.weights) == 12
    train, val = batches((20, 20, 20)), batches((5, 5, 5), seed=3)
    found = br.hypergradient(problem, train, val, br.Unrolled(5, 0.1), seed=1)
    again = br.hypergradient(problem, train, val, br.Unrolled(5, 0.1), seed=1)
    assert found.norm == again.norm > 0.0


@pytest.mark.parametrize("batched", [True, False])
def test_folds_have_their_own_dropout_masks(batched):
    """Equal weights and batches: only the masks can differ."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 1))
    decay = br.hyperparameters.WeightDecay(model, per="global")
    problem = br.Folds(model, decay, decayed, squared_error, 3, batched=batched)
    train = batches((20,)) * 3
    losses = problem.losses(train).detach()
    assert problem.batched is batched
    assert len(set(losses.tolist())) == 3
    method = br.Implicit(br.Neumann(1, scale=0.01))
    seeds = [br.hypergradient(problem, train, train, method, seed=seed).norm for seed in (5, 5, 6)]
    assert seeds[0] == seeds[1] != seeds[2]
    if not batched:  # equal weights, batches and masks would give one fold's hypergradient
        alone = br.hypergradient(problem.folds[0], train[0], train[0], method, seed=5).norm
        assert seeds[0] != pytest.approx(3 * alone)


@pytest.mark.parametrize("initial", [0.1, 1.0])
def test_penalty_approaches_the_exact_hypergradient_of_the_folds(initial):
    model = nn.Linear(3, 1)
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=initial)
    problem = br.Folds(model, decay, decayed, squared_error, 3)
    train, val = batches(SIZES["by one"]), batches((5, 5, 5), seed=3)
    Minimise(tolerance=1e-15)(problem, train)
    exact = br.hypergradient(problem, train, val, METHODS["exact"])
    found = br.hypergradient(problem, train, val, br.Penalty(100, 0.2, multiplier=1e4))
    assert_near(found.total, exact.total, 1e-3)


class Keeps(nn.Module):
    """A layer that counts its passes, or keeps its last activation."""

    def __init__(self, what):
        super().__init__()
        self.what, self.count, self.last = what, 0, None

    def forward(self, x):
        if self.what == "count":
            self.count += 1
        else:
            self.last = x
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, :, None])[0][:, -1]


IN_TURN = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "layer norm": lambda: nn.LayerNorm(4),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()
    ),
    "recurrent": Recurrent,
    "count": lambda: Keeps("count"),
    "activation": lambda: Keeps("activation"),
}


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
@pytest.mark.parametrize("layer", IN_TURN)
def test_models_that_vmap_cannot_run_run_in_turn(layer):
    model = nn.Sequential(nn.Linear(3, 4), IN_TURN[layer](), nn.Tanh(), nn.Linear(4, 1))
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.1)
    problem = br.Folds(model, decay, decayed, squared_error, 3)
    scatter(problem)
    train, val = batches((12, 12, 12)), batches((5, 5, 5), seed=3)
    expected, val_loss = alone(problem, train, val, METHODS["damped cg"])
    before = {n: b.clone() for n, b in problem.model.named_buffers()}
    found = br.hypergradient(problem, train, val, METHODS["damped cg"])
    assert problem.batched is False
    assert_near(found.total, expected)
    assert found.val_loss == pytest.approx(val_loss)
    assert all(torch.equal(b, before[n]) for n, b in problem.model.named_buffers())


def test_a_lasso_leaves_out_the_weights_that_each_fold_holds():
    """The hypergradient of the lasso, batched and in turn, is the slope of the loss after training again."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    y = x[:, 0] - 0.5 * x[:, 1] + 0.3 * torch.randn(60, generator=generator)
    train, val = fold_batches((x, y), 4)
    again, results = Minimise(), []
    for batched in (True, False):
        model = nn.Linear(6, 1)
        decay = br.hyperparameters.WeightDecay(model, power=1, exclude=["bias"], initial=0.15)
        problem = br.Folds(model, decay, decayed, squared_error, 4, batched=batched)
        again(problem, next(iter(train)))
        held = {n: int((w == 0).sum()) for n, w in problem.weights.items()}
        assert sum(held.values()) > 4
        found = br.hypergradient(problem, next(iter(train)), next(iter(val)), br.Implicit(br.Exact()))
        results.append(found.total["log_decay"])
        values = []
        for rate in (1e-4, -2e-4):
            with torch.no_grad():
                decay.log_decay.add_(rate)
            again(problem, next(iter(train)))
            values.append(float(problem.losses(next(iter(val)), "val_loss").mean().detach()))
        assert float(results[-1]) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)
        assert held == {n: int((w == 0).sum()) for n, w in problem.weights.items()}
        assert problem.batched is batched
    torch.testing.assert_close(*results)


def test_tuner_steps_stop_at_zero_in_each_fold():
    x = torch.randn(40, 6)
    train, val = fold_batches((x, x[:, 0]), 4)
    model = nn.Linear(6, 1)
    decay = br.hyperparameters.WeightDecay(model, power=1, exclude=["bias"], initial=0.3)
    problem = br.Folds(model, decay, decayed, squared_error, 4)
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(decay.parameters(), 0.0),
        weight_steps=10,
    )
    tuner.fit(train, val, 10)
    for fold in problem.folds:
        assert int((fold.weights["weight"] == 0).sum()) >= 3


@pytest.mark.parametrize("method", ["warm", "penalty", "differences"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_saved_run_continues_like_one_that_never_stopped(tmp_path, method, batched):
    def start():
        problem, train, _ = network(batched=batched, sizes=(20, 20, 20))
        data = (torch.cat([x for x, _ in train]), torch.cat([y for _, y in train]))
        own = {
            "warm": br.Implicit(br.ConjugateGradient(2, recycle=2, damping=None), warm_start=True),
            "penalty": br.Penalty(3, 0.05),
            "differences": br.Implicit(br.ConjugateGradient(2), br.FiniteDifference(), warm_start=True),
        }[method]
        optimizers = (
            torch.optim.Adam(problem.weights.values(), 0.02),
            torch.optim.Adam(problem.hyper.parameters(), 0.1),
        )
        return br.Tuner(problem, *optimizers, own, weight_steps=2), fold_batches(
            data, 3, batch_size=6, seed=1
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", br.BestResponseWarning)
        whole, loaders = start()
        whole.fit(*loaders, 5)
        first, loaders = start()
        first.fit(*loaders, 3)
        first.save(tmp_path / "run.pt")
        second, loaders = start()
        second.load(tmp_path / "run.pt")
        second.fit(*loaders, 2)
    for one, other in zip(whole.problem.live().values(), second.problem.live().values(), strict=True):
        assert torch.equal(one, other)
    for row, other in zip(whole.history, second.history, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("batched", [True, False])
def test_a_failed_call_leaves_the_state_of_every_fold(batched):
    problem, train, val = network(batched=batched, trained=True)
    method = br.Implicit()
    br.hypergradient(problem, train, val, method)
    before = problem.state(method)
    broken = (*val[:2], (val[2][0] * torch.nan, val[2][1]))
    with pytest.raises(br.Error):
        br.hypergradient(problem, train, broken, method)
    after = problem.state(method)
    assert all(torch.equal(x, after.solution[n]) for n, x in before.solution.items())


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_several_batches_of_folds_are_their_mean():
    problem, train, val = network(sizes=(12, 12, 12))
    halves = [tuple((x[i::2], y[i::2]) for x, y in train) for i in (0, 1)]
    for name in ("exact", "gauss-newton", "unrolled"):
        whole = br.hypergradient(problem, train, val, METHODS[name])
        parts = br.hypergradient(problem, br.Batches(halves), br.Batches([val, val]), METHODS[name])
        assert_near(parts.total, whole.total)


def test_verification_finds_a_lost_derivative_in_folds(verifying):
    def lost(model, hyper, batch):
        return (
            squared_error(model, hyper, batch)
            + (hyper.log_decay.exp() * model.weight.detach() * model.weight).sum()
        )

    for batched in (True, False):
        model = nn.Linear(3, 1)
        decay = br.hyperparameters.WeightDecay(model, per="global", initial=0.5)
        problem = br.Folds(model, decay, decayed, squared_error, 3, batched=batched)
        found = br.hypergradient(problem, batches((12,) * 3), batches((5,) * 3), br.Implicit(br.Exact()))
        assert found.verification == "verified"
        wrong = br.Folds(model, decay, lost, squared_error, 3, batched=batched)
        with pytest.warns(br.BestResponseWarning, match="is not the gradient of train_loss"):
            found = br.hypergradient(wrong, batches((12,) * 3), batches((5,) * 3), br.Implicit(br.Exact()))
        assert found.verification.startswith("not verified")
        assert (wrong.batched, problem.batched) == (batched, batched)


@pytest.mark.slow
def test_check_accepts_folds(monkeypatch):
    monkeypatch.setattr(measuring, "_alive", list)  # slow among the many objects of a test session
    problem, train, val = network(trained=True)
    found = br.diagnostics.check(problem, train, val, retrain_steps=5)
    assert found.ok, str(found)
    assert any(row.method == "Implicit()" and not row.failed for row in found.rows)


@pytest.mark.parametrize("kind", ["adam", "sgd", "minimise"])
def test_retrain_trains_the_given_model_on_all_data(kind):
    problem, train, val = network(sizes=(12, 12, 12))
    data = torch.cat([x for x, _ in train]), torch.cat([y for _, y in train])
    make = {
        "adam": lambda weights: torch.optim.Adam(weights, 0.05, betas=(0.8, 0.9)),
        "sgd": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9),
    }
    optimizer = make[kind](problem.weights.values()) if kind in make else Minimise()
    tuner = br.Tuner(problem, optimizer, torch.optim.SGD(problem.hyper.parameters(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", br.BestResponseWarning)
        tuner.fit([train], [val], 2)
    folds = {n: w.detach().clone() for n, w in problem.weights.items()}
    model, lone = problem.whole.model, copy.deepcopy(problem.whole.model)
    losses = tuner.retrain([data], 5, lambda model: None)
    assert len(losses) == 5
    assert all(torch.equal(w, folds[n]) for n, w in problem.weights.items())
    if kind in make:
        own = make[kind](lone.parameters())
        for _ in range(5):
            own.zero_grad()
            decayed(lone, problem.hyper, data).backward(inputs=list(lone.parameters()))
            own.step()
        for one, other in zip(model.parameters(), lone.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    else:
        gradient = torch.autograd.grad(decayed(model, problem.hyper, data), list(model.parameters()))
        assert max(float(g.abs().max()) for g in gradient) < 1e-5


def test_the_warning_of_one_failed_fold_does_not_call_the_whole_indirect_part_zero():
    problem, train, val = network(trained=True)
    signed = lambda m, h, b: b[2] * squared_error(m, h, b[:2]) + problem.hyper(m)  # noqa: E731
    folds = br.Folds(problem.whole.model, problem.hyper, signed, squared_error, 3)
    method = br.Implicit(br.ConjugateGradient(10, damping=1.0))

    def call(signs):
        batch = tuple((*x, torch.tensor(sign)) for x, sign in zip(train, signs, strict=True))
        with pytest.warns(br.BestResponseWarning, match="the linear solve ended with negative") as caught:
            h = br.hypergradient(folds, batch, val, method)
        folds._warned.clear()
        return h, str(caught[0].message)

    h, message = call([100.0, 100.0, -1000.0])
    assert any(x.any() for x in h.indirect.values())
    assert "zero is used" not in message
    h, message = call([-1000.0] * 3)
    assert not any(x.any() for x in h.indirect.values())
    assert "zero is used, so the indirect part is zero" in message


def test_inputs_and_targets_are_not_taken_for_two_folds():
    model = nn.Linear(3, 1)
    loss = lambda m, h, b: (m(b[0]) - b[1]).square().mean() + h(m)  # noqa: E731
    problem = br.Folds(model, br.hyperparameters.WeightDecay(model), loss, loss, 2)
    plain = (torch.randn(6, 3), torch.randn(6))
    with pytest.raises(br.Error, match="look like the parts of one batch, with 2 dimensions of .* and 1 dim"):
        br.hypergradient(problem, plain, plain, br.Implicit())


def test_wrong_batches_are_named():
    problem, train, val = network()
    with pytest.raises(br.Error, match="tuple of 3 batches"):
        br.hypergradient(problem, train[:2], val, br.Implicit())
    with pytest.raises(br.Error, match="tuple of 3 batches"):
        br.hypergradient(problem, train[0][0], val, br.Implicit())
    each = br.Folds(problem.whole.model, problem.hyper, lambda m, h, b: m(b[0])[:, 0], squared_error, 3)
    with pytest.raises(br.Error, match="train_loss must return a scalar"):
        br.hypergradient(each, train, val, br.Implicit())
    with pytest.raises(br.Error, match="train_loss must return a scalar"):
        each.losses(train)
    with pytest.raises(br.Error, match="folds must be"):
        br.Folds(problem.whole.model, problem.hyper, decayed, squared_error, 1)


# --- each fold as it would be alone -----------------------------------------------------------------------


def test_clipping_is_that_of_each_fold():
    problem, train, val = network(trained=False)
    copies = [copy.deepcopy(problem.model.get_submodule(f"fold{k}")) for k in range(3)]
    step = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyper.parameters(), 0.0),
        br.Implicit(br.Identity()),
        clip_weights=0.05,
        weight_steps=3,
    )
    step.fit([train], [val], 1)
    for k, model in enumerate(copies):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            decayed(model, problem.hyper, train[k]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        own = dict(problem.model.get_submodule(f"fold{k}").named_parameters())
        assert all(torch.allclose(w, own[n], atol=1e-6) for n, w in model.named_parameters())


def of_weights(batched, **settings):
    torch.manual_seed(0)
    model, table = nn.Linear(3, 1), br.hyperparameters.Weights(12, "clamp", **settings)

    def weighed(model, hyper, batch):
        losses = (model(batch[0])[:, 0] - batch[1]).square()
        return (hyper(batch[2]) * losses).mean() + 0.01 * model.weight.square().sum()

    problem = br.Folds(model, table, weighed, squared_error, 3, batched=batched)
    train = tuple((x, y, torch.arange(4) + 4 * k) for k, (x, y) in enumerate(batches((4, 4, 4))))
    return problem, table, train, batches((5, 5, 5), seed=3)


@pytest.mark.parametrize("batched", [True, False])
def test_a_table_of_weights_is_the_same_batched_and_in_turn(batched):
    problem, table, train, val = of_weights(batched, shrinkage=0.1)
    with torch.no_grad():
        table.table.fill_(2.0)
    train = tuple((x[:1], y[:1], index[:1]) for x, y, index in train)
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 1e-3),
        torch.optim.SparseAdam(table.parameters(), 1e-3),
        br.Implicit(br.Exact()),
    )
    tuner.fit([train], [val], 1)
    assert (table.table != 2.0).nonzero()[:, 0].tolist() == [0, 4, 8]
    wrong = tuple((x, y, index - 1 - 4 * k) for k, (x, y, index) in enumerate(train))
    with pytest.raises(br.Error, match="got -1"):
        problem.losses(wrong)
