import json
import math
import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import bestresponse as br
import cases
from bestresponse.runs import callbacks


def make(method=None, hidden=None, weight_rate=0.05, **arguments):
    problem, train, val = cases.network(hidden)
    weights = torch.optim.SGD(problem.weights.values(), weight_rate)
    hyper = torch.optim.Adam(problem.hyperparameters.values(), 0.05)
    tuner = br.Tuner(problem, weights, hyper, method or br.Implicit(), **arguments)
    return tuner, [train], [val]


def test_the_validation_loss_falls_below_that_of_training_alone():
    tuner, train, val = make(weight_steps=5, weight_rate=0.5)
    tuner.problem.hyper.maximum = 1.0  # a decay above 2 / (learning rate) makes gradient descent diverge
    tuner.fit(train, val, 120)
    plain, *_ = make(weight_rate=0.5)
    for _ in range(600):
        plain._move_weights(train[0])
    with torch.no_grad():
        tuned, untuned = (
            t.problem.val_loss(t.problem.model, t.problem.hyper, val[0]) for t in (tuner, plain)
        )
    assert float(tuned) < 0.9 * float(untuned)


def test_counts_and_history():
    tuner, train, val = make(weight_steps=3, warmup_steps=7)
    history = tuner.fit(train, val, 4)
    assert [row["weight_step"] for row in history] == [10, 13, 16, 19]
    assert [row["hyper_step"] for row in history] == [1, 2, 3, 4]
    for key in ("train_loss", "val_loss", "hypergradient_norm", "products", "residual", "seconds"):
        assert all(math.isfinite(row[key]) for row in history)
    tuner.fit(train, val, 2)
    assert len(tuner.history) == 6
    assert tuner.weight_step == 25


def test_one_step_is_algorithm_1_by_hand():
    tuner, train, val = make(br.Implicit(br.Neumann(3, 0.1)))
    problem, batch, val_batch = tuner.problem, train[0], val[0]
    expected, other_train, other_val = cases.network()
    expected.model.load_state_dict(problem.model.state_dict())
    expected.hyper.load_state_dict(problem.hyper.state_dict())
    weights = torch.optim.SGD(expected.weights.values(), 0.05)
    hyper = torch.optim.Adam(expected.hyperparameters.values(), 0.05)
    for _ in range(3):
        loss = expected.train_loss(expected.model, expected.hyper, batch)
        loss.backward(inputs=list(expected.weights.values()))
        weights.step()
        weights.zero_grad()
        br.backward(expected, batch, val_batch, br.Implicit(br.Neumann(3, 0.1)))
        hyper.step()
        hyper.zero_grad()
        expected.hyper.project_()
    tuner.fit(train, val, 3)
    for mine, theirs in (
        (problem.weights, expected.weights),
        (problem.hyperparameters, expected.hyperparameters),
    ):
        assert all(torch.allclose(x, theirs[n], rtol=1e-12) for n, x in mine.items())


def test_weight_steps_leave_the_grad_of_hyperparameters_alone():
    tuner, train, _ = make()
    tuner._move_weights(train[0])
    assert all(p.grad is None for p in tuner.problem.hyperparameters.values())


def test_loaders_are_cycled_independently():
    tuner, _, _ = make(br.Implicit(curvature=br.Hessian()))
    seen = []
    loss = tuner.problem.train_loss
    tuner.problem.train_loss = lambda m, h, b: (seen.append(("train", b[0])), loss(m, h, b[1]))[1]
    val_loss = tuner.problem.val_loss
    tuner.problem.val_loss = lambda m, h, b: (seen.append(("val", b[0])), val_loss(m, h, b[1]))[1]
    _, train, val = cases.network()
    tuner.fit([(i, train) for i in range(3)], [(i, val) for i in range(2)], 3)
    # A weight step and a hyper-step take a training batch each.
    assert [i for kind, i in seen if kind == "train"] == [0, 1, 2, 0, 1, 2]
    assert [i for kind, i in seen if kind == "val"] == [0, 1, 0]


def test_a_run_is_deterministic_for_a_seed():
    def weights(seed):
        torch.manual_seed(0)
        tuner, train, val = make(hidden=nn.Dropout(0.5), seed=seed)
        torch.manual_seed(5)
        tuner.fit(train, val, 5)
        return torch.cat([p.detach().view(-1) for p in tuner.problem.hyperparameters.values()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_each_hyper_step_draws_masks_of_its_own():
    tuner, train, val = make(br.Implicit(br.Neumann(3, 0.1)), hidden=nn.Dropout(0.5), weight_rate=0.0)
    tuner.hyper_optimizer.param_groups[0]["lr"] = 0.0
    norms = [row["hypergradient_norm"] for row in tuner.fit(train, val, 3)]
    assert len(set(norms)) == 3  # of the same weights, hyperparameters and batches


def test_schedulers_step_at_their_own_pace():
    tuner, train, val = make(weight_steps=2)
    tuner.weight_scheduler = StepLR(tuner.weight_optimizer, 1, gamma=0.5)
    tuner.hyper_scheduler = StepLR(tuner.hyper_optimizer, 1, gamma=0.1)
    tuner.fit(train, val, 3)
    assert tuner.weight_optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**6)
    assert tuner.hyper_optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)


def test_a_scheduler_that_wants_a_metric_gets_the_validation_loss():
    tuner, train, val = make()
    given = []

    class Plateau(ReduceLROnPlateau):
        def step(self, metrics):
            given.append(metrics)

    tuner.hyper_scheduler = Plateau(tuner.hyper_optimizer)
    tuner.weight_scheduler = Plateau(tuner.weight_optimizer)
    history = tuner.fit(train, val, 2)
    # Weight steps before the first validation loss have none to give.
    assert given == [history[0]["val_loss"], history[0]["val_loss"], history[1]["val_loss"]]


def test_clipping_of_the_training_gradient():
    tuner, train, _ = make(clip_weights=1e-3, weight_rate=1.0)
    before = [w.detach().clone() for w in tuner.problem.weights.values()]
    tuner._move_weights(train[0])
    moved = [w.detach() - b for w, b in zip(tuner.problem.weights.values(), before, strict=True)]
    assert float(torch.cat([m.view(-1) for m in moved]).norm()) == pytest.approx(1e-3, rel=1e-2)


def test_hyperparameters_are_held_in_their_bounds():
    tuner, train, val = make()
    tuner.problem.hyper.maximum = 0.06
    tuner.fit(train, val, 1)
    assert all(float(v.max()) <= 0.06 + 1e-12 for v in tuner.problem.hyper.values().values())


def test_a_function_as_inner_solver():
    known = cases.softmax()
    hyper = torch.optim.Adam(known.problem.hyperparameters.values(), 0.1)
    tuner = br.Tuner(known.problem, cases.newton, hyper, br.Implicit(br.Exact()))
    history = tuner.fit([known.train], [known.val], 20)
    assert history[-1]["val_loss"] < history[0]["val_loss"]


def test_policies():
    method = br.Implicit(br.ConjugateGradient(3))
    for policy in ("warn", "raise", "skip"):
        tuner, train, val = make(method, policy=policy, weight_rate=1e-6)
        tuner.problem.train_loss = lambda model, decay, batch: -decay(model)
        before = [p.detach().clone() for p in tuner.problem.hyperparameters.values()]
        if policy == "raise":
            with pytest.raises(br.Error, match="hyper-step 1.*negative curvature"):
                tuner.fit(train, val, 2)
            continue
        if policy == "warn":
            with pytest.warns(br.BestResponseWarning, match="negative curvature") as caught:
                tuner.fit(train, val, 3)
            assert len(caught) == 1
            assert all(row["stepped"] for row in tuner.history)
        else:
            with pytest.warns(br.BestResponseWarning, match="hyper-step 1 is skipped") as caught:
                tuner.fit(train, val, 3)
            assert len(caught) == 1
            assert not any(row["stepped"] for row in tuner.history)
            assert all(
                torch.equal(p, b) for p, b in zip(tuner.problem.hyperparameters.values(), before, strict=True)
            )
        assert tuner.history[-1]["status"] == "negative curvature"


def test_a_training_loss_that_is_no_longer_finite_is_an_error():
    tuner, train, val = make(weight_rate=1e200)
    with pytest.raises(br.Error, match="must (stay|be) finite"):
        tuner.fit(train, val, 5)


# --- bad input --------------------------------------------------------------------------------


def parts():
    problem, train, val = cases.network()
    return problem, list(problem.weights.values()), list(problem.hyperparameters.values())


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        (
            lambda w, h: (torch.optim.SGD(w, 0.1, weight_decay=1e-4), torch.optim.Adam(h)),
            "weight_decay=0.*0.0001",
        ),
        (lambda w, h: (torch.optim.AdamW(w), torch.optim.Adam(h)), "weight_decay=0"),
        (lambda w, h: (torch.optim.SGD(w[1:], 0.1), torch.optim.Adam(h)), r"lacks \['0\.weight'\]"),
        (
            lambda w, h: (torch.optim.SGD(w + h[:1], 0.1), torch.optim.Adam(h)),
            r"got the hyperparameters \['log_decay",
        ),
        (
            lambda w, h: (torch.optim.SGD(w, 0.1), torch.optim.Adam(h + w[:1])),
            r"got the weights \['0\.weight'\]",
        ),
        (lambda w, h: (torch.optim.SGD(w, 0.1), torch.optim.Adam(h[1:])), r"none of \['log_decay"),
        (lambda w, h: (torch.optim.LBFGS(w), torch.optim.Adam(h)), "LBFGS.*step\\(closure\\)"),
        (lambda w, h: (0.1, torch.optim.Adam(h)), "must be a torch optimiser or a function"),
        (lambda w, h: (torch.optim.SGD, torch.optim.Adam(h)), "must be a torch optimiser or a function"),
        (lambda w, h: (torch.optim.SGD(w, 0.1), lambda: None), "hyper-optimiser must be a torch optimiser"),
    ],
)
def test_bad_optimisers(optimizers, words):
    problem, weights, hyperparameters = parts()
    with pytest.raises(br.Error, match=words):
        br.Tuner(problem, *optimizers(weights, hyperparameters))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight_steps": 0}, "weight_steps must be an integer ≥ 1"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer ≥ 0"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer ≥ 0"),
        ({"clip_weights": "x"}, "clip_weights must be a number"),
        ({"clip_hypergradient": -1.0}, "clip_hypergradient must be positive"),
        ({"max_rise": 1.0}, "max_rise must be above 1"),
        ({"clip_weights": 0.0}, "clip_weights"),
        ({"policy": "ignore"}, "policy"),
        ({"method": br.Neumann(3)}, "A solver goes inside a method"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(br.Error, match=words):
        make(**arguments)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (lambda b: [], "must hold at least one batch"),
        (lambda b: iter([b]), "must be a collection that can be iterated repeatedly"),
        (lambda b: (x for x in [b]), "must be a collection that can be iterated repeatedly"),
        (lambda b: 5, "must be a collection of batches"),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_bad_loaders(batches, words, which):
    tuner, train, val = make()
    given = [train, val]
    given[which] = batches(given[which][0])
    with pytest.raises(br.Error, match=("train_batches", "val_batches")[which] + " " + words):
        tuner.fit(*given, 3)


# --- retraining and callbacks --------------------------------------------------------------------


def test_retrain_starts_from_scratch_with_the_first_settings():
    tuner, train, val = make(weight_rate=0.2)
    tuner.weight_scheduler = StepLR(tuner.weight_optimizer, 1, gamma=0.5)
    initial = {n: w.detach().clone() for n, w in tuner.problem.weights.items()}
    tuner.fit(train, val, 5)
    decays = [p.detach().clone() for p in tuner.problem.hyperparameters.values()]
    losses = tuner.retrain(train, 3, lambda model: model.load_state_dict(initial))
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, d) for p, d in zip(tuner.problem.hyperparameters.values(), decays, strict=True))
    expected = {n: w.clone().requires_grad_() for n, w in initial.items()}
    for _ in range(3):
        with tuner.problem.undisturbed() as passes:
            gradient = torch.autograd.grad(passes.train_loss(train[0], expected), list(expected.values()))
        expected = {
            n: (w - 0.2 * g).detach().requires_grad_()
            for (n, w), g in zip(expected.items(), gradient, strict=True)
        }
    assert all(torch.allclose(w, expected[n], rtol=1e-10) for n, w in tuner.problem.weights.items())
    assert tuner.weight_optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**5)


def test_retrain_clips_the_gradient():
    tuner, train, _ = make(weight_rate=0.2, clip_weights=1e-3)
    weights = list(tuner.problem.weights.values())
    before = torch.cat([w.detach().flatten() for w in weights])
    tuner.retrain(train, 1, lambda model: None)
    moved = torch.cat([w.detach().flatten() for w in weights]) - before
    assert float(moved.norm()) == pytest.approx(0.2 * 1e-3, rel=1e-5)


def test_retrain_empties_the_optimisers_state():
    problem, train, val = cases.network()
    weights = torch.optim.Adam(problem.weights.values(), 0.01)
    tuner = br.Tuner(problem, weights, torch.optim.Adam(problem.hyperparameters.values()))
    tuner.fit([train], [val], 3)
    step = next(iter(weights.state.values()))["step"].clone()
    tuner.retrain([train], 2, lambda model: None)
    assert next(iter(weights.state.values()))["step"] == step


def test_retrain_uses_the_settings_of_an_optimiser_that_was_assigned_later():
    tuner, train, val = make(weight_rate=0.2)
    weights = list(tuner.problem.weights.values())
    groups = [{"params": weights[:1], "lr": 0.3}, {"params": weights[1:]}]
    tuner.weight_optimizer = other = torch.optim.SGD(groups, 0.1)
    tuner.weight_scheduler = StepLR(other, 1, gamma=0.5)
    tuner.fit(train, val, 2)
    before = [w.detach().clone() for w in weights]
    gradients = torch.autograd.grad(
        tuner.problem.train_loss(tuner.problem.model, tuner.problem.hyper, train[0]), weights
    )
    tuner.retrain(train, 1, lambda model: None)
    for w, old, g, rate in zip(weights, before, gradients, [0.3, 0.1, 0.1, 0.1], strict=True):
        assert torch.allclose(w, old - rate * g, rtol=1e-12)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.3 / 4, 0.1 / 4])


def test_any_function_is_a_callback_and_may_stop_the_run():
    tuner, train, val = make(callbacks=[lambda t: t.stop("enough") if t.hyper_step == 2 else None])
    assert len(tuner.fit(train, val, 10)) == 2
    assert tuner.stopped == "enough"
    assert len(tuner.fit(train, val, 1)) == 3


def test_evaluate_keeps_modes_and_random_state_and_measures_the_last_step():
    def measure(model, hyper):
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"test": torch.rand(()) + hyper.power}

    tuner, train, val = make(hidden=nn.Dropout(0.5), callbacks=[callbacks.Evaluate(measure, every=2)])
    torch.manual_seed(0)
    tuner.fit(train, val, 3)
    assert ["test" in row for row in tuner.history] == [False, True, True]
    assert tuner.problem.model.training
    assert all(2.0 <= row["test"] < 3.0 for row in tuner.history[1:])


def test_keep_best_restores_weights_buffers_and_hyperparameters():
    best = callbacks.KeepBest("score", mode="max")
    tuner, train, val = make(
        hidden=nn.BatchNorm1d(4),
        callbacks=[lambda t: t.history[-1].update(score=-abs(t.hyper_step - 3)), best],
    )
    states = {}
    tuner.callbacks.append(
        lambda t: states.update(
            {t.hyper_step: {n: x.clone() for n, x in t.problem.model.state_dict().items()}}
        )
    )
    tuner.fit(train, val, 6)
    assert best.row["hyper_step"] == 3
    best.restore(tuner)
    assert all(torch.equal(x, states[3][n]) for n, x in tuner.problem.model.state_dict().items())
    assert not all(torch.equal(x, states[6][n]) for n, x in tuner.problem.model.state_dict().items())
    with pytest.raises(br.Error, match="needs a row"):
        callbacks.KeepBest().restore(tuner)


def test_early_stopping():
    tuner, train, val = make(
        callbacks=[
            lambda t: t.history[-1].update(score=-t.hyper_step if t.hyper_step < 4 else 0.0),
            callbacks.EarlyStopping("score", patience=3),
        ]
    )
    assert len(tuner.fit(train, val, 50)) == 6
    assert "score has not improved" in tuner.stopped
    with pytest.raises(br.Error, match="patience"):
        callbacks.EarlyStopping(patience=0)
    with pytest.raises(br.Error, match="mode"):
        callbacks.KeepBest(mode="best")
    with pytest.raises(br.Error, match="every"):
        callbacks.Evaluate(lambda m, h: {}, every=0)


def test_json_lines_are_whole_after_an_interrupt(tmp_path):
    path = tmp_path / "rows.jsonl"

    def interrupt(tuner):
        if tuner.hyper_step == 3:
            raise KeyboardInterrupt

    tuner, train, val = make(callbacks=[callbacks.JSONLines(path), interrupt])
    with pytest.raises(KeyboardInterrupt):
        tuner.fit(train, val, 10)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["hyper_step"] for row in rows] == [1, 2, 3]
    tuner.callbacks.pop()
    tuner.fit(train, val, 2)
    assert len(path.read_text().splitlines()) == 5


def test_json_lines_write_numbers_that_are_not_finite_as_null():
    assert json.loads(callbacks.to_json({"a": math.nan, "b": math.inf, "c": 1.5, "d": "x"})) == {
        "a": None,
        "b": None,
        "c": 1.5,
        "d": "x",
    }


def test_progress_shows_both_losses_and_the_norm(capsys):
    tuner, train, val = make(callbacks=[callbacks.Progress()])
    tuner.fit(train, val, 3)
    shown = capsys.readouterr().err
    assert "3 of 3 hyper-steps" in shown
    assert re.search(r"2 of 3 hyper-steps, \d+ s, \d+ s left: ", shown)
    assert all(word in shown for word in ("train=", "val=", "|dL/dλ|="))


def test_one_batch_is_no_collection_of_batches():
    tuner, train, val = make()
    with pytest.raises(br.Error, match=r"a tuple of 2 tensors, which looks like one batch. Pass \[batch\]"):
        tuner.fit(train[0], val, 1)
