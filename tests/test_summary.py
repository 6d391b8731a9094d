"""Summaries of the hyperparameters in the history."""

import math

import pytest
import torch
from torch import nn

import bestresponse as br
import loops
from bestresponse.runs.summary import Summary, flat_numbers


def summary_of(hyper, model=None):
    model = model or nn.Linear(3, 2)
    return Summary(br.Problem(model, hyper, lambda m, h, b: b, lambda m, h, b: b))


class Own(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.values = nn.ParameterDict({n: nn.Parameter(torch.arange(float(k))) for n, k in sizes.items()})


def test_small_tensors_are_stored_whole_and_large_ones_as_quantiles():
    found = summary_of(Own(few=8, many=101)).of(1, 1)["hyperparameters"]
    assert found["values.few"] == {"value": list(range(8))}
    assert found["values.many"] == {"quantiles": [0, 5, 25, 50, 75, 95, 100]}


def test_the_quantiles_of_a_large_tensor_are_those_of_a_sample():
    quantiles = summary_of(Own(many=100_000)).of(1, 1)["hyperparameters"]["values.many"]["quantiles"]
    expected = [100_000 * level for level in (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)]
    assert quantiles == pytest.approx(expected, abs=200)


@pytest.mark.parametrize(
    ("hyper", "name", "value"),
    [
        (lambda m: br.hyperparameters.WeightDecay(m, per="global", initial=0.5), "decay", 0.5),
        (lambda m: br.hyperparameters.WeightDecay(m, per="tensor", initial=0.5), "decay.bias", 0.5),
        (
            lambda m: br.hyperparameters.WeightDecay(m, per="tensor", around="global", initial=0.5),
            "centre",
            0.5,
        ),
        (
            lambda m: br.hyperparameters.WeightDecay(m, per="tensor", around="global", initial=0.5),
            "log_decay.bias",
            0.0,
        ),
        (lambda m: br.hyperparameters.ConcreteDropout((), initial=0.3), "rate", 0.3),
        (lambda m: br.hyperparameters.Weights(1, "softplus", initial=0.7), "weights", 0.7),
        (lambda m: br.hyperparameters.Weights(1, "softmax"), "logits", 0.0),
        (lambda m: nn.ModuleDict({"of": br.hyperparameters.ConcreteDropout((), 0.3)}), "of.rate", 0.3),
    ],
)
def test_modules_give_plain_values(hyper, name, value):
    model = nn.Linear(3, 2)
    found = summary_of(hyper(model), model).of(1, 1)["hyperparameters"]
    assert found[name] == {"value": [pytest.approx(value)]}


def test_long_summaries_come_less_often_and_at_the_end():
    summary = summary_of(Own(**{f"a{i}": 20 for i in range(20)}))
    assert [i for i in range(1, 9) if summary.of(i, 8)] == [1, 6, 8]


def test_a_large_sparse_table_is_sampled():
    table = br.hyperparameters.Weights(10**6, "softplus")
    read = []
    plain = table._positive
    table._positive = lambda x: read.append(len(x)) or plain(x)
    quantiles = summary_of(table).of(1, 1)["hyperparameters"]["weights"]["quantiles"]
    assert quantiles == pytest.approx([1.0] * 7)
    assert max(read) < 3000


def test_the_history_has_the_hyperparameters_after_each_step():
    one = loops.problem(loops.network(torch.float64), per="tensor")
    tuner = br.Tuner(
        one,
        torch.optim.SGD(one.weights.values(), 0.1),
        torch.optim.Adam(one.hyperparameters.values(), 0.1),
    )
    train, val = map(loops.batches, loops.data(torch.float64))
    tuner.fit(train, val, 3)
    for name, decay in one.hyper.values().items():
        assert tuner.history[-1]["hyperparameters"][f"decay.{name}"] == {
            "value": [pytest.approx(float(decay))]
        }
    first, last = (row["hyperparameters"]["decay.0.weight"]["value"] for row in tuner.history[::2])
    assert first != last


def test_the_numbers_of_a_row_are_flat():
    row = {
        "val_loss": 0.5,
        "status": "steps used",
        "scale": None,
        "stepped": True,
        "hyperparameters": {
            "a": {"value": [1.0]},
            "b": {"value": [1.0, math.inf]},
            "c": {"quantiles": [0, 1, 2, 3, 4, 5, 6]},
        },
    }
    found = flat_numbers(row)
    assert found["val_loss"] == 0.5
    assert found["stepped"] == 1.0
    assert found["hyperparameters/a"] == 1.0
    assert found["hyperparameters/b/1"] == math.inf
    assert found["hyperparameters/c/median"] == 3.0
    assert not {"status", "scale"} & found.keys()
