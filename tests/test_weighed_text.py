"""The recipes that weigh sources of text: what they draw, how they tune, and what they refuse."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse import cli
from bestresponse.experiments import documents, text, weighing
from bestresponse.experiments.adapters import Adapters
from bestresponse.experiments.documents import Pool
from bestresponse.experiments.mixture import Mixture


class Bigram(nn.Module):
    """Logits of the next word from the last one, in the form of a Hugging Face model's output."""

    def __init__(self, words):
        super().__init__()
        self.table = nn.Embedding(words, words)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table(input_ids))


def cycles(rows, step, words=12, length=9):
    """Documents that count in steps, from random starts."""
    return (torch.randint(words, (rows, 1)) + step * torch.arange(length)) % words


@pytest.fixture
def two_sources():
    spoilt = torch.arange(30) % 2 == 0
    return Pool.of({"wrong": cycles(30, 5), "right": cycles(20, 1)}, {"wrong": spoilt})


def test_a_pool_has_shares_of_sources_and_weights_of_documents(two_sources):
    weights = two_sources.mixture([1.0, 3.0])
    assert two_sources.shares(weights) == pytest.approx({"wrong": 0.25, "right": 0.75})
    assert weights[0] / weights[-1] == pytest.approx((1 / 30) / (3 / 20))
    assert int(two_sources.spoilt.sum()) == 15


def test_documents_are_drawn_by_the_weights_of_the_moment(two_sources):
    weights = two_sources.mixture([1.0, 0.0])
    batches = iter(documents.Drawn(two_sources, lambda: weights, 10, 0))
    words, index, drawn = next(batches)
    assert two_sources.source[index].tolist() == [0] * 10
    assert len(set(index.tolist())) == 10
    torch.testing.assert_close(words, two_sources.words[index])
    torch.testing.assert_close(drawn, weights[index])
    weights = two_sources.mixture([0.0, 1.0])
    assert two_sources.source[next(batches)[1]].tolist() == [1] * 10


def test_shuffled_documents_keep_their_words_and_noise_replaces_a_share_of_them():
    words, generator = torch.randint(1000, (50, 40)), torch.Generator().manual_seed(0)
    mixed = documents.shuffled(words, generator)
    torch.testing.assert_close(mixed.sort(1).values, words.sort(1).values)
    assert float((mixed == words).double().mean()) < 0.1
    noisy = documents.with_noise(words, 0.3, generator)
    assert 0.65 < float((noisy == words).double().mean()) < 0.75
    with pytest.raises(
        br.Error,
        match="--documents must leave enough text; 60 documents of 40 tokens are needed, and there are 50",
    ):
        documents.take(words, 30, 30)


def test_the_training_loss_is_that_of_the_drawn_documents_and_responds_to_their_weights(two_sources):
    model, hyper = Bigram(12), documents.PoolWeights(two_sources, True)
    index = torch.tensor([0, 3, 40])
    batch = two_sources.words[index], index, hyper.all()[index]
    loss, each = (
        weighing.train_loss(model, hyper, batch),
        weighing.losses(weighing.logits(model, batch[0]), batch[0]),
    )
    torch.testing.assert_close(loss, each.mean())
    (slope,) = torch.autograd.grad(loss, hyper.documents.table)
    response = each / (3 * hyper.documents.values()[index]) * hyper.documents.table[index].sigmoid()
    torch.testing.assert_close(slope[index], response.detach())
    assert int((slope != 0).sum()) == 3


@pytest.mark.parametrize("method", weighing.METHODS)
def test_tuning_gives_the_source_that_is_like_the_validation_text_the_largest_share(method, two_sources):
    model = Bigram(12)
    tuning = weighing.Tuning(8, 20, 40, 10, 5, weight_rate=0.1, rate=0.5)
    hyper, clock = tuning.run(model, two_sources, cycles(40, 1), method, seed=0)
    assert two_sources.shares(hyper.all())["right"] > 0.8
    assert 0.0 < clock.speed(5) < clock.speed(20) <= 1.0
    assert tuning.further() == pytest.approx(6 * 28 / (40 * 8))


def test_the_clock_separates_weight_steps_from_hyper_steps():
    ends = [0.0]
    for step in range(
        1, 31
    ):  # a second for each weight step, four for a hyper-step after every fifth, from ten on
        hyper = step > 10 and (step - 1) % 5 == 0 and step > 15
        ends.append(ends[-1] + 1.0 + 4.0 * hyper)
    clock = weighing.Clock(5, 10, ends[1:])
    assert clock.speed(5) == pytest.approx(5 / 9)
    assert clock.speed(20) == pytest.approx(20 / 24)
    assert weighing.Clock(5, 10, ends[1:5]).speed(5) is None


def test_the_first_seed_chooses_the_rate_by_text_that_no_hypergradient_saw():
    rows = [
        {"way": "SAMA", "seed": 0, "rate": r, "choice perplexity": c} for r, c in ((0.1, 9.0), (0.3, 7.0))
    ]
    rows += [{"way": "SAMA", "seed": 1, "rate": 0.3, "choice perplexity": 8.0}]
    kept = Mixture().chosen(rows)["SAMA"]
    assert [(row["seed"], row["rate"]) for row in kept] == [(0, 0.3), (1, 0.3)]


@pytest.mark.parametrize(("name", "package"), [("mixture", "transformers"), ("adapters", "peft")])
def test_a_recipe_names_the_extra_that_is_missing(name, package, monkeypatch, tmp_path, capsys):
    for other in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, other, None if other == package else ModuleType(other))
    assert cli.main(["reproduce", name, "--out", str(tmp_path)]) == 1
    extra = "transformers" if name == "mixture" else "adapters"
    assert f"needs the package '{package}'" in (shown := capsys.readouterr().err)
    assert f"bestresponse[{extra}]" in shown


def test_options_that_do_not_fit_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    for options, message in (
        (["--steps", "21"], "must be --warmup plus a multiple of --weight-steps; got 21, 10 and 5"),
        (["--batch", "50"], "--batch must be at most --documents, 40"),
        (["--width", "18"], "--width must be a multiple of 16"),
    ):
        assert cli.main(["reproduce", "mixture", "--out", str(tmp_path), *options]) == 1
        assert message in capsys.readouterr().err


def test_a_repeated_command_takes_the_finished_rows_and_later_seeds_the_best_rate(monkeypatch, tmp_path):
    """With rows that cost nothing: the second rate is the better one on the first seed."""
    made = []

    def row(self, given, way, rate, seed):
        made.append((way, rate, seed))
        value = 10.0 - (rate or 0.0)
        shares = {"right": 0.75, "wrong": 0.25}
        return {"test perplexity": value + 1.0, "choice perplexity": value, "shares": shares}

    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(Mixture, "given", lambda self, seed: None)
    monkeypatch.setattr(Mixture, "row", row)
    words = ["reproduce", "mixture", "--out", str(tmp_path), "--rates", "0.1", "0.3"]
    words += ["--ways", "uniform", "SAMA", "--seeds"]
    assert cli.main([*words, "1"]) == 0
    assert made == [("uniform", None, 0), ("SAMA", 0.1, 0), ("SAMA", 0.3, 0)]
    made.clear()
    assert cli.main([*words, "2"]) == 0
    assert made == [("uniform", None, 1), ("SAMA", 0.3, 1)]
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["headline"] == pytest.approx({"uniform": 11.0, "SAMA": 10.7})
    assert (tmp_path / "mixture.png").is_file()


def test_the_code_that_comes_with_python_is_a_text_in_three_parts():
    train, val, test = text.parts("code")
    assert len(train) > 3 * len(val) > 0 < len(test)
    assert {"self", "return", "<eos>"} <= set(train)
    assert all(word.replace("'", "").islower() or word == "<eos>" for word in train if word.strip("'"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_only_the_adapters_of_a_frozen_base_are_trained():
    pytest.importorskip("peft")
    torch.set_default_dtype(torch.float32)
    recipe = Adapters(base_steps=2)
    recipe.tasks(torch.device("cpu"), None)
    given = recipe.given(0)
    model = recipe._adapted(given, 0)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    frozen = [weight for name, weight in model.named_parameters() if name not in trained]
    assert all(weight.dtype == torch.bfloat16 for weight in frozen)
    before = [weight.clone() for weight in frozen]
    recipe.tuning(0.3).run(model, given.pool, given.val, "Gauss-Newton", 0)
    assert all(torch.equal(old, new) for old, new in zip(before, frozen, strict=True))
