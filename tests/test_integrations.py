"""Hyper-steps inside a training loop other than `Tuner.fit`."""

import sys
import warnings

import pytest
import torch
from torch import nn

import bestresponse as br
import loops
from bestresponse import integrations
from bestresponse.integrations import Tuning


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def make(weight_steps=2, **settings):
    one = loops.problem(loops.network())
    weights = torch.optim.SGD(one.weights.values(), 0.1)
    hyper = torch.optim.Adam(one.hyperparameters.values(), 0.05)
    method = settings.pop("method", br.Implicit(br.Neumann(3, 0.1)))
    return br.Tuner(one, weights, hyper, method, weight_steps=weight_steps, **settings)


def run(tuning, begin=0, end=8, accumulated=1, clip=None):
    """Some weight steps of a loop that knows nothing of hyperparameters."""
    tuner = tuning.tuner
    one, optimizer = tuner.problem, tuner.weight_optimizer
    batches = loops.batches(loops.data()[0])
    rows = []
    with tuning:
        for number in range(begin * accumulated, end * accumulated):
            batch = batches[number % len(batches)]
            loss = one.train_loss(one.model, one.hyper, batch)
            (loss / accumulated).backward()
            stepped = number % accumulated == accumulated - 1
            if stepped:
                if clip:
                    nn.utils.clip_grad_norm_([*one.model.parameters(), *one.hyper.parameters()], clip)
                optimizer.step()
                optimizer.zero_grad()
            rows.append(tuning.after_batch(batch, loss, stepped))
    return rows


def assert_rates(one, expected):
    for name, rate in one.hyperparameters.items():
        torch.testing.assert_close(rate.detach(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("accumulated", "clip"), [(1, None), (2, 0.3)])
def test_a_loop_with_tuning_agrees_with_one_by_hand(accumulated, clip):
    tuner = make()
    rows = run(Tuning(tuner, loops.batches(loops.data()[1])), accumulated=accumulated, clip=clip)
    expected = loops.by_hand(loops.problem(loops.network()), 8, 2, accumulated, clip)
    assert_rates(tuner.problem, expected)
    assert [row for row in rows if row] == tuner.history
    assert [row["weight_step"] for row in tuner.history] == [2, 4, 6, 8]
    assert all(p.grad is None for p in tuner.problem.hyperparameters.values())


def test_the_warmup_comes_first_and_callbacks_are_told_the_end():
    seen = []

    class Last:
        def __call__(self, tuner):
            seen.append((tuner.hyper_step, tuner.last_hyper_step))

        def close(self):
            seen.append("closed")

    tuner = make(warmup_steps=3, callbacks=[Last()])
    run(Tuning(tuner, loops.batches(loops.data()[1]), steps=8))
    assert [row["weight_step"] for row in tuner.history] == [5, 7]
    assert seen == [(1, 2), (2, 2), "closed"]


def test_a_callback_may_stop_it():
    tuner = make(callbacks=[lambda t: t.stop("enough")])
    run(Tuning(tuner, loops.batches(loops.data()[1])))
    assert len(tuner.history) == 1
    assert tuner.stopped == "enough"


def test_a_restored_tuning_goes_on_as_if_it_had_not_stopped():
    def made():
        tuner = make(method=br.Implicit(), weight_steps=3, callbacks=[br.callbacks.EarlyStopping(patience=9)])
        return Tuning(tuner, loops.batches(loops.data()[1]))

    whole = made()
    run(whole, end=12)
    first = made()
    run(first, end=7)
    again = made()
    again.tuner.problem.model.load_state_dict(first.tuner.problem.model.state_dict())
    again.load_state_dict(first.state_dict())
    run(again, begin=7, end=12)
    for name, rate in whole.tuner.problem.hyperparameters.items():
        assert torch.equal(rate, again.tuner.problem.hyperparameters[name])
    plain = [{k: v for k, v in row.items() if k != "seconds"} for row in whole.tuner.history]
    assert plain == [{k: v for k, v in row.items() if k != "seconds"} for row in again.tuner.history]


def test_a_state_of_another_tuning_is_refused():
    tuning = Tuning(make(), loops.batches(loops.data()[1]))
    state = tuning.state_dict()
    with pytest.raises(br.Error, match="made like the saved one"):
        tuning.load_state_dict(state | {"parts": {}})
    with pytest.raises(br.Error, match="like the saved ones"):
        tuning.load_state_dict(state | {"hyper": {}})


def test_the_losses_run_in_the_context_and_place_of_the_loop():
    places, inside = [], []

    def place(batch):
        places.append(len(batch))
        return tuple(batch)

    tuner = make(weight_steps=4)
    loss = tuner.problem.train_loss
    tuner.problem.train_loss = lambda m, h, b: (
        inside.append((torch.is_autocast_enabled("cpu"), type(b))) or loss(m, h, b)
    )
    given = tuner.problem.train_loss, tuner.problem.val_loss
    tuning = Tuning(
        tuner,
        [list(b) for b in loops.batches(loops.data()[1])],
        context=lambda: torch.autocast("cpu", torch.bfloat16),
        place=place,
    )
    run(tuning, end=3)
    assert {autocast for autocast, _ in inside} == {False}
    inside.clear()
    with torch.autocast("cpu", torch.bfloat16):  # the linear algebra of a solve stays out of it
        seen = []
        tuner.callbacks.append(lambda t: seen.append(torch.is_autocast_enabled("cpu")))
        tuning.hyper_step(loops.batches(loops.data()[0])[0])
    assert seen == [False]
    assert set(inside) == {(True, tuple)}
    assert places
    assert (tuner.problem.train_loss, tuner.problem.val_loss) == given


def test_several_processes_are_refused(monkeypatch):
    tuning = Tuning(make(), loops.batches(loops.data()[1]))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(br.Error, match="must run in one process"):
        tuning.__enter__()


def test_messages_name_what_the_loss_of_the_user_captures():
    tuner = make(weight_steps=1)
    scale = nn.Parameter(torch.ones(()))
    tuner.problem.val_loss = lambda m, h, b: scale * loops.fit(m, h, b)
    tuning = Tuning(tuner, loops.batches(loops.data()[1]))
    with pytest.warns(br.BestResponseWarning, match=r"belong neither to model nor to hyper: scale \[\]"):
        tuning.hyper_step(loops.batches(loops.data()[0])[0])


def test_a_loop_that_trains_on_another_loss_is_warned_of():
    tuner = make(weight_steps=1)
    tuning = Tuning(tuner, loops.batches(loops.data()[1]))
    batch = loops.batches(loops.data()[0])[0]
    with tuning:
        loops.fit(tuner.problem.model, None, batch).backward()
        tuner.weight_optimizer.step()
        with pytest.warns(br.BestResponseWarning, match=r"must train on problem\.train_loss"):
            tuning.after_batch(batch)
    assert tuner.history[0]["train_loss"] > 0  # measured, since the loop gave none


@pytest.mark.parametrize(
    "settings",
    [{"clip_weights": 1.0}, {"weight_scheduler": torch.optim.lr_scheduler.StepLR}],
)
def test_what_the_loop_does_itself_is_refused(settings):
    tuner = make()
    for name, value in settings.items():
        setattr(tuner, name, value)
    with pytest.raises(br.Error, match="the training loop does it"):
        Tuning(tuner, [1])


# --- gradients of the training loss in .grad -----------------------------------------------------


def polluted():
    tuner = make()
    one, batch = tuner.problem, loops.batches(loops.data()[0])[0]
    return one, batch, lambda: one.train_loss(one.model, one.hyper, batch).backward()


def test_backward_over_a_gradient_of_the_training_loss_warns_by_name():
    one, batch, train = polluted()
    train()
    with pytest.warns(br.BestResponseWarning, match=r"other values for log_decay\.0\.weight.*∂L_T/∂λ"):
        br.backward(one, batch, batch, br.Direct())


@pytest.mark.parametrize("to_none", [True, False])
def test_backward_into_empty_gradients_or_onto_hypergradients_does_not_warn(to_none):
    one, batch, train = polluted()
    hyper = torch.optim.SGD(one.hyperparameters.values(), 0.1)
    method = br.Implicit(br.Neumann(1, 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            train()
            hyper.zero_grad(set_to_none=to_none)
            first = br.backward(one, batch, batch, method)
            br.backward(one, batch, batch, method)
            for name, parameter in one.hyperparameters.items():
                torch.testing.assert_close(parameter.grad, 2 * first.total[name])
            hyper.step()


def test_a_training_gradient_on_top_of_a_hypergradient_warns():
    one, batch, train = polluted()
    br.backward(one, batch, batch, br.Implicit(br.Neumann(1, 0.1)))
    train()
    with pytest.warns(br.BestResponseWarning, match="other values"):
        br.backward(one, batch, batch, br.Implicit(br.Neumann(1, 0.1)))


def test_a_sparse_gradient_of_the_training_loss_warns():
    table = br.hyperparameters.Weights(5, "softplus")
    model = nn.Linear(3, 1)
    x, index = torch.randn(4, 3), torch.tensor([0, 1, 1, 4])

    def train_loss(m, h, b):
        return (h(index) * m(b)[:, 0].square()).mean() + m.weight.square().sum()

    one = br.Problem(model, table, train_loss, lambda m, h, b: m(b).square().mean())
    method = br.Implicit(br.Neumann(1, 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        br.backward(one, x, x, method)
        br.backward(one, x, x, method)
    train_loss(model, table, x).backward()
    assert table.table.grad.is_sparse
    with pytest.warns(br.BestResponseWarning, match="other values for table"):
        br.backward(one, x, x, method)


@pytest.mark.parametrize(
    ("name", "package"), [("LightningTuning", "lightning"), ("TrainerTuning", "transformers")]
)
def test_a_missing_library_is_named_with_its_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"bestresponse.integrations.{package}", raising=False)
    monkeypatch.delattr(integrations, package, raising=False)
    with pytest.raises(
        br.Error, match=f"needs the package '{package}'.*pip install 'bestresponse\\[{package}\\]'"
    ):
        getattr(integrations, name)


class Wrapper:
    """As accelerate wraps loaders: it has ``state_dict``, which works only if the inner loader has one."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def state_dict(self):
        return self.batches.state

    def load_state_dict(self, state):
        self.batches.state = state


def test_a_loader_whose_inner_loader_has_no_state_is_replayed():
    tuning = Tuning(make(), Wrapper(loops.batches(loops.data()[1])))
    next(tuning.val_batches)
    again = Tuning(make(), Wrapper(loops.batches(loops.data()[1])))
    again.load_state_dict(tuning.state_dict())
    assert torch.equal(next(again.val_batches)[0], next(tuning.val_batches)[0])


@pytest.mark.parametrize(("steps", "warned"), [(9, False), (12, True)])
def test_a_loop_without_a_hyper_step_warns(steps, warned):
    tuning = Tuning(make(weight_steps=50), loops.batches(loops.data()[1]))
    batch = loops.batches(loops.data()[0])[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tuning:
            for _ in range(steps):
                tuning.after_batch(batch, 0.5)  # a plain number will do
    assert any("no hyper-step was made in 12 weight steps" in str(w.message) for w in caught) == warned
