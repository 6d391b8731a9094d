"""The recipes that weigh data: what they draw, and that weights beat training without them."""

import json

import pytest
import torch

from bestresponse import cli
from bestresponse.experiments import data, influence, noisy_labels
from bestresponse.experiments.noisy_labels import NoisyLabels


def test_noisy_labels_are_random_for_the_share_that_is_asked_for():
    images, config = data.load("digits"), NoisyLabels(examples=1000, right=198, noise=0.3)
    given = noisy_labels._draw(images, config, 0, torch.device("cpu"))
    (x, y), right = images.draw(1000, 198, seed=0)
    assert torch.equal(given.noisy[0], x)
    assert torch.equal(given.wrong, given.noisy[1] != y)
    assert (
        0.3 * 0.8 < float(given.wrong.double().mean()) < 0.3
    )  # a tenth of the random labels is right by chance
    assert all(torch.equal(got, expected) for got, expected in zip(given.right, right, strict=True))
    again = noisy_labels._draw(images, config, 0, torch.device("cpu"))
    assert torch.equal(again.noisy[1], given.noisy[1])


def test_a_batch_of_the_loader_is_rows_of_all_columns():
    columns = torch.arange(10), 2 * torch.arange(10)
    batches = list(noisy_labels._loader(4, *columns))
    assert [len(first) for first, _ in batches] == [4, 4, 2]
    assert all(torch.equal(second, 2 * first) for first, second in batches)
    assert sorted(torch.cat([first for first, _ in batches]).tolist()) == list(range(10))


@pytest.mark.slow
def test_weights_from_a_network_of_the_loss_beat_training_without_weights(tmp_path):
    torch.set_default_dtype(torch.float32)
    ways = ["all images", "a network of the loss"]
    words = ["reproduce", "noisy-labels", "--seeds", "2", "--ways", *ways, "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0
    rows = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["rows"]
    plain, weighted = ({row["way"]: row for row in rows}[way] for way in ways)
    assert weighted["at the end"] > plain["at the end"] + 0.08
    assert weighted["trained anew"] > plain["trained anew"] + 0.02
    assert weighted["detection"] > 0.97


def test_influence_pictures_have_the_share_of_wrong_labels_that_is_asked_for():
    images, config = data.load("digits"), influence.InfluencePictures(examples=100, validation=50, noise=0.2)
    given = influence._draw(images, config, 3, torch.device("cpu"))
    (x, y), val = images.draw(100, 50, seed=3)
    assert torch.equal(given.whole[1], x)
    assert torch.equal(given.right, y)
    assert int(given.wrong.sum()) == 20
    assert torch.equal(given.wrong, given.whole[2] != y)
    assert all(torch.equal(got, expected) for got, expected in zip(given.val, val, strict=True))
    assert torch.equal(torch.cat([index for index, _, _ in given.pieces()]), torch.arange(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--digits", "3", "10"], "--digits must be below 10"),
        (["--noise", "0"], "--noise must give some images a wrong label"),
        (["--removed", "200"], "--shown and --removed must be below --examples"),
    ],
)
def test_influence_refuses_options_that_do_not_fit(options, message, tmp_path, capsys):
    assert cli.main(["reproduce", "influence", *options, "--out", str(tmp_path / "run")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_influence_predicts_the_direction_of_each_change_and_finds_wrong_labels(tmp_path):
    torch.set_default_dtype(torch.float32)
    assert cli.main(["reproduce", "influence", "--out", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["headline"]["changes in the predicted direction"] == 1.0
    assert result["headline"]["wrong labels by self-influence"] > 0.5
