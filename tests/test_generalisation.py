"""Shrinkage of hyperparameters, the watch on a third part of the data, and the agreement of two halves."""

import math
import warnings

import pytest
import torch
from torch import nn

import bestresponse as br
import cases
from bestresponse.batches import Batches, halves_of
from bestresponse.hyperparameters import ConcreteDropout, Shrinkage, Shrunk, WeightDecay
from bestresponse.runs import callbacks

pytestmark = pytest.mark.filterwarnings("ignore:the linear solve ended")


def make(method=None, rate=0.05, **arguments):
    torch.manual_seed(0)
    problem, train, val = cases.network()
    weights = torch.optim.SGD(problem.weights.values(), 0.05)
    hyper = torch.optim.Adam(problem.hyperparameters.values(), rate)
    return br.Tuner(problem, weights, hyper, method or br.Implicit(), **arguments), [train], [val]


# --- shrinkage ------------------------------------------------------------------------------------------


def grid():
    return {
        "a": torch.arange(6.0).reshape(2, 3).requires_grad_(),
        "b": torch.tensor([10.0, 20.0], requires_grad=True),
    }


@pytest.mark.parametrize(
    ("within", "a", "b"),
    [
        ("tensor", 2.5, 15.0),
        ("global", 45.0 / 8.0, 45.0 / 8.0),
        ("unit", [[1.0], [4.0]], 15.0),
        ("input", [[1.5, 2.5, 3.5]], 15.0),
        (lambda name: 0, 45.0 / 8.0, 45.0 / 8.0),
        (lambda name: name, 2.5, 15.0),
    ],
)
@pytest.mark.parametrize("strength", [0.1, 1.0])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_shrinkage_moves_a_share_of_the_way_to_the_mean_of_the_group(within, a, b, strength, factor):
    parameters, before = grid(), grid()
    Shrinkage(strength, within=within).apply_(parameters, factor)
    for name, mean in (("a", a), ("b", b)):
        start = before[name].detach()
        expected = start + strength * factor * (torch.tensor(mean) - start)
        torch.testing.assert_close(parameters[name].detach(), expected)


def test_shrinkage_towards_a_decay_and_a_rate():
    net = nn.Linear(2, 2)
    decay = WeightDecay(net, initial=0.1, shrinkage=Shrinkage(0.5, towards=0.001))
    decay.shrink_()
    middle = math.sqrt(0.1 * 0.001)
    assert all(float(x) == pytest.approx(middle, rel=1e-5) for x in decay.values()["weight"].flatten())
    drop = ConcreteDropout(3, 0.5, shrinkage=Shrinkage(1.0, towards=0.2))
    drop.shrink_(0.5)
    assert drop.rates().tolist() == pytest.approx([torch.tensor(-math.log(4.0) / 2).sigmoid().item()] * 3)
    free = ConcreteDropout(3, 0.5)
    free.shrink_()
    assert free.rates().tolist() == pytest.approx([0.5] * 3)


def test_only_rows_with_a_step_shrink():
    table = nn.Parameter(torch.arange(8.0).reshape(4, 2))
    table.grad = torch.sparse_coo_tensor([[1, 3, 1]], torch.ones(3, 2), (4, 2), check_invariants=True)
    Shrunk(nn.ParameterList([table]), 1.0).shrink_()
    assert table.tolist() == [[0.0, 1.0], [3.5, 3.5], [4.0, 5.0], [3.5, 3.5]]


@pytest.mark.parametrize("within", ["global", "tensor", lambda name: 0])
def test_frozen_parameters_do_not_shrink_or_count(within):
    parameters = grid()
    parameters["b"].requires_grad_(False)
    Shrinkage(1.0, within=within).apply_(parameters, 1.0)
    assert parameters["b"].tolist() == [10.0, 20.0]
    torch.testing.assert_close(parameters["a"].detach(), torch.full((2, 3), 2.5))
    Shrinkage(1.0, within=within).apply_({"b": parameters["b"]}, 1.0)


def test_full_shrinkage_keeps_a_group_at_one_value_and_bounds_come_last():
    tuner, train, val = make(rate=0.5, weight_steps=1)
    decay = tuner.problem.hyper
    decay.shrinkage, decay.maximum = Shrinkage(1.0), math.exp(-7.9)
    tuner.fit(train, val, 3)
    for name, rates in decay.named_parameters():
        assert float(rates.detach().std(correction=0)) < 1e-12, name
        assert float(rates.detach().max()) <= -7.9 + 1e-12


def test_shrinkage_follows_the_scheduler_of_the_hyperparameters():
    tuner, train, val = make(rate=0.5)
    decay = tuner.problem.hyper
    factors = []
    decay.shrink_ = factors.append
    tuner.hyper_scheduler = torch.optim.lr_scheduler.StepLR(tuner.hyper_optimizer, 1, 0.5)
    tuner.fit(train, val, 3)
    assert factors == [1.0, 0.5, 0.25]


def test_any_module_can_be_wrapped():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.tensor([0.0, 4.0]))

        def forward(self, scale):
            return scale * self.logits.sum()

    module = Shrunk(Weights(), 0.25)
    assert float(module(2.0).detach()) == 8.0
    module.shrink_()
    assert module.module.logits.tolist() == [0.5, 3.5]
    problem, train, val = cases.network()
    wrapped = Shrunk(problem.hyper, Shrinkage(0.1, within="global"))
    same = br.Problem(problem.model, wrapped, problem.train_loss, problem.val_loss)
    h, other = (br.hypergradient(p, train, val, br.Implicit(br.Exact())) for p in (problem, same))
    for name, x in h.total.items():
        torch.testing.assert_close(other.total[f"module.{name}"], x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Shrinkage(1.5), "strength must be between 0 and 1; got 1.5"),
        (lambda: Shrinkage("much"), "must be a number"),
        (lambda: Shrinkage(0.1, within="layer"), "within must be"),
        (
            lambda: WeightDecay(nn.Linear(1, 1), shrinkage=-0.1),
            r"WeightDecay.shrinkage must be between 0 and 1",
        ),
        (lambda: WeightDecay(nn.Linear(1, 1), shrinkage="x"), "number from 0 to 1 or a Shrinkage"),
        (lambda: WeightDecay(nn.Linear(1, 1), shrinkage=Shrinkage(0.1, towards=0.0)), "towards must be"),
        (lambda: ConcreteDropout(shrinkage=Shrinkage(0.1, towards=1.0)), "towards must be"),
        (lambda: Shrunk(3, 0.1), "module must be a module"),
    ],
)
def test_bad_shrinkage(call, words):
    with pytest.raises(br.Error, match=words):
        call()


# --- the watch ------------------------------------------------------------------------------------------


def overfitted(watch, **arguments):
    """A run in which the watch's loss, eight minus the validation loss, rises while that falls; and what to fit."""
    torch.manual_seed(0)
    problem, (x, y), _ = cases.network()
    loss = problem.val_loss
    problem = br.Problem(
        problem.model,
        problem.hyper,
        problem.train_loss,
        lambda m, h, b: loss(m, h, b[:2]) if b[2] > 0 else 8.0 - loss(m, h, b[:2]),
    )
    weights = torch.optim.SGD(problem.weights.values(), 0.05)
    hyper = torch.optim.Adam(problem.hyperparameters.values(), 0.05)
    watch.batches = [(x, y, torch.tensor(-1.0))]
    tuner = br.Tuner(problem, weights, hyper, br.Implicit(), watch=watch, **arguments)
    return tuner, [(x, y)], [(x, y, torch.tensor(1.0))]


def test_the_watch_measures_keeps_the_best_state_and_warns_when_the_gap_opens():
    tuner, train, val = overfitted(callbacks.Watch([], 2, 3))
    with pytest.warns(br.BestResponseWarning, match="overfit the validation data") as caught:
        tuner.fit(train, val, 21)
    assert len([w for w in caught if "overfit" in str(w.message)]) == 1
    rows = [row for row in tuner.history if "watch_loss" in row]
    assert [row["hyper_step"] for row in rows] == [*range(2, 21, 2), 21]
    best = min(rows, key=lambda row: row["watch_loss"])
    assert tuner.watch.row is best is rows[0]
    recent = [row["val_loss"] for row in tuner.history[2:4]]
    assert rows[1]["watch_gap"] == pytest.approx(rows[1]["watch_loss"] - sum(recent) / 2)
    assert tuner.watch.measure(tuner) > best["watch_loss"] + 1e-3
    tuner.watch.restore(tuner)
    assert tuner.watch.measure(tuner) == pytest.approx(best["watch_loss"])


@pytest.mark.parametrize(("fall", "warns"), [(0.01, False), (0.05, True)])
def test_a_fall_of_the_validation_loss_that_may_be_noise_is_no_overfitting(fall, warns):
    tuner, _, _ = overfitted(callbacks.Watch([], 1, 3))
    watch = tuner.watch
    watch.row = {"hyper_step": 1, "watch_loss": 1.0}
    watch._value, watch._state = 1.0, {}
    watch._means = [1.0, 1.0, 1.0]
    tuner.history.append({"hyper_step": 5, "val_loss": 1.0 - fall})
    watch.measure = lambda tuner: 2.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(tuner)
    assert any("overfit" in str(w.message) for w in caught) == warns


def test_the_watch_is_the_mean_over_examples_and_changes_nothing():
    plain, train, val = make()
    plain.fit(train, val, 4)
    x, y = val[0]
    tuner, *_ = make(watch=[(x[:5], y[:5]), Batches([(x[5:6], y[5:6]), (x[6:9], y[6:9])], weights=[1, 3])])
    tuner.watch.every = 1
    tuner.fit(train, val, 4)
    for a, b in zip(plain.history, tuner.history, strict=True):
        assert a["val_loss"] == b["val_loss"]
    problem = tuner.problem
    whole = problem.val_loss(problem.model.eval(), problem.hyper, (x[:9], y[:9]))
    assert tuner.history[-1]["watch_loss"] == pytest.approx(float(whole.detach()), rel=1e-6)


def test_no_warning_while_the_watch_falls_too():
    tuner, train, val = make(weight_steps=5, watch=None)
    tuner = br.Tuner(tuner.problem, tuner.weight_optimizer, tuner.hyper_optimizer, watch=val, weight_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the linear solve ended")
        tuner.fit(train, val, 40)


@pytest.mark.filterwarnings("ignore:the loss on the watch")
def test_the_watch_continues_after_a_save(tmp_path):
    whole, train, val = overfitted(callbacks.Watch([], 2, 4))
    whole.fit(train, val, 9)
    first, train, val = overfitted(callbacks.Watch([], 2, 4))
    first.fit(train, val, 5)
    first.save(tmp_path / "run.pt")
    second, train, val = overfitted(callbacks.Watch([], 2, 4))
    second.load(tmp_path / "run.pt")
    assert second.watch.row["watch_loss"] == first.watch.row["watch_loss"]
    second.fit(train, val, 4)
    for key in ("watch_loss", "watch_gap", "hyper_step"):
        assert second.history[7][key] == whole.history[7][key]
        assert second.watch.row[key] == whole.watch.row[key]


def test_the_watch_can_stop_a_run():
    stop = callbacks.EarlyStopping("watch_loss", 3)
    tuner, train, val = overfitted(callbacks.Watch([], 1), callbacks=[stop])
    tuner.fit(train, val, 100)
    assert tuner.hyper_step == tuner.watch.row["hyper_step"] + 3
    assert "watch_loss has not improved" in tuner.stopped


def test_a_watch_that_is_never_a_number_keeps_nothing():
    tuner, train, val = overfitted(callbacks.Watch([], 1, 2))
    (x, y, sign) = tuner.watch.batches[0]
    tuner.watch.batches = [(x * math.nan, y, sign)]
    tuner.fit(train, val, 9)
    assert tuner.watch._means[-1] < tuner.watch._means[0]
    assert all(math.isnan(row["watch_loss"]) for row in tuner.history)
    with pytest.raises(br.Error, match="KeepBest needs a row"):
        tuner.watch.restore(tuner)


@pytest.mark.parametrize(
    ("watch", "words"),
    [
        (iter([1]), "can be iterated repeatedly"),
        (3, "collection of batches"),
        ([], "must hold at least one batch"),
    ],
)
def test_bad_watch(watch, words):
    def run():
        tuner, train, val = make(watch=watch)
        tuner.fit(train, val, 1)

    with pytest.raises(br.Error, match=words):
        run()


# --- two halves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [br.Implicit(br.Exact()), br.Implicit(br.Neumann(5, scale=0.1)), br.Unrolled(3, 0.1), br.Penalty(3, 0.1)],
    ids=repr,
)
def test_halves_give_the_mean_and_the_cosine(method):
    problem, train, (x, y) = cases.network()
    halves, parts = br.Halves(method), []
    result = br.hypergradient(problem, train, (x, y), halves)
    for i in (0, 1):
        problem.forget(halves)
        parts.append(br.hypergradient(problem, train, (x[i::2], y[i::2]), method))
    sizes = [len(x[i::2]) / len(x) for i in (0, 1)]
    flat = [torch.cat([t.flatten() for t in part.total.values()]) for part in parts]
    for name, t in result.total.items():
        torch.testing.assert_close(t, sum(c * part.total[name] for c, part in zip(sizes, parts, strict=True)))
    cosine = torch.nn.functional.cosine_similarity(*flat, dim=0)
    assert result.agreement == pytest.approx(float(cosine))
    assert result.val_loss == pytest.approx(
        sum(c * part.val_loss for c, part in zip(sizes, parts, strict=True))
    )
    assert result.row()["agreement"] == result.agreement
    if result.solve is not None:
        assert result.solve.products == sum(part.solve.products for part in parts)
    assert "agreement" not in parts[0].row()


def test_equal_halves_agree_and_opposite_ones_do_not():
    problem, train, (x, y) = cases.network()
    twice = Batches([(x, y), (x, y)])
    assert br.hypergradient(problem, train, twice, br.Halves()).agreement == pytest.approx(1.0)
    flipped = br.Problem(
        problem.model, problem.hyper, problem.train_loss, lambda m, h, b: b[2] * problem.val_loss(m, h, b[:2])
    )
    opposite = Batches([(x, y, torch.tensor(1.0)), (x, y, torch.tensor(-1.0))])
    assert br.hypergradient(flipped, train, opposite, br.Halves()).agreement == pytest.approx(-1.0)


def test_each_half_keeps_its_own_start_also_in_a_file_and_after_a_failure(tmp_path):
    method = br.Halves()
    tuner, train, val = make(method)
    tuner.fit(train, val, 6)
    starts = [tuner.problem.state(part).solution for part in method.parts_that_remember().values()][:2]
    assert all(start is not None for start in starts)
    assert any(not torch.equal(starts[0][n], starts[1][n]) for n in starts[0])

    first, *_ = make(br.Halves())
    first.fit(train, val, 3)
    first.save(tmp_path / "run.pt")
    second, *_ = make(br.Halves())
    second.load(tmp_path / "run.pt")
    second.fit(train, val, 3)
    assert [row["val_loss"] for row in second.history] == [row["val_loss"] for row in tuner.history]

    x, y = val[0]
    spoilt = x.clone()
    spoilt[1] = math.nan  # in the second half
    with pytest.raises(br.Error):
        br.hypergradient(tuner.problem, train[0], (spoilt, y), method)
    after = [tuner.problem.state(part).solution for part in method.parts_that_remember().values()][:2]
    assert all(a is b for a, b in zip(starts, after, strict=True))


def test_a_run_stops_when_its_steps_are_noise():
    tuner, train, (batch,) = make(br.Halves(), callbacks=[callbacks.StopAtNoise(0.9, 3)])
    tuner.fit(train, [Batches([batch, batch])], 6)
    assert tuner.hyper_step == 6  # equal halves agree
    x, y = batch
    tuner.fit(train, [Batches([(x, y), (-x, y)])], 20)
    assert 6 < tuner.hyper_step < 26
    assert "mean agreement" in tuner.stopped
    plain, train, val = make(callbacks=[callbacks.StopAtNoise()])
    with pytest.raises(br.Error, match="needs hypergradients with an agreement"):
        plain.fit(train, val, 1)


def test_stopping_at_noise_passes_over_skipped_hyper_steps():
    tuner, train, (batch,) = make(br.Halves(), callbacks=[callbacks.StopAtNoise(0.9, 3)], policy="skip")
    x, y = batch
    spoilt = torch.full_like(x, math.nan)
    pairs = [Batches([(x, y), (-x, y)]), Batches([(spoilt, y), (spoilt, y)])]  # every second hyper-step fails
    with pytest.warns(br.BestResponseWarning, match="skip"):
        tuner.fit(train, pairs, 20)
    assert not all(row["stepped"] for row in tuner.history)
    assert "mean agreement" in tuner.stopped


def test_halves_of_halves_are_refused():
    with pytest.raises(br.Error, match="for each half; got Halves"):
        br.Halves(br.Halves())


def test_halves_of_a_batch():
    x = torch.arange(5)
    (one, c), (other, d) = halves_of({"x": x, "scale": torch.tensor(2.0)})
    assert (one["x"].tolist(), other["x"].tolist()) == ([0, 2, 4], [1, 3])
    assert (c, d) == pytest.approx((0.6, 0.4))
    assert float(one["scale"]) == 2.0
    (one, c), (other, d) = halves_of(Batches([1, 2, 3], weights=[1, 2, 3]))
    assert (list(one), list(other)) == ([1, 3], [2])
    assert (c, d) == pytest.approx((2 / 3, 1 / 3))
    texts = ["a", "b", "c", "d", "e"]
    (one, _), (other, _) = halves_of((x, texts, tuple(texts), "text", 3.0, None))
    assert one[1:] == (["a", "c", "e"], ("a", "c", "e"), "text", 3.0, None)
    assert other[1:] == (["b", "d"], ("b", "d"), "text", 3.0, None)
    for bad in (x[:1], "text", (x, x[:2]), (x, texts[:4]), (x, x.numpy())):
        with pytest.raises(br.Error, match="divided into halves"):
            halves_of(bad)
