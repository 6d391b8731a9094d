"""`--preset paper` is the table of docs/paper-settings.md, and its networks run at these settings."""

import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
tyro = pytest.importorskip("tyro")

from bestresponse import cli  # noqa: E402
from bestresponse.experiments import augment, catalogue, language, lstm, runs  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "paper-settings.md"
SETTINGS = re.findall(
    r"^\| `([^`]+)` \| `--([^`]+)` \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def shown(value):
    """A value as the table has it."""
    if isinstance(value, tuple):
        return (", " if any(" " in str(one) for one in value) else " ").join(map(str, value))
    return str(value)


@pytest.mark.parametrize(("command", "option", "value"), SETTINGS)
def test_the_preset_has_the_papers_setting(command, option, value):
    name, *more = shlex.split(command)
    kind = catalogue.EXPERIMENTS[name]
    found = getattr(tyro.cli(kind, args=more, default=kind.of_preset("paper")), option.replace("-", "_"))
    if isinstance(found, int | float):
        assert found == float(value)
    else:
        assert shown(found) == value


def test_the_table_has_every_experiment_with_settings_in_the_paper():
    without = {"methods", "best-response", "shapes", "generalisation", "noisy-labels", "influence"}
    without |= {"mixture", "adapters"}
    assert {command.split()[0] for command, _, _ in SETTINGS} == catalogue.EXPERIMENTS.keys() - without


# What makes the run short. The sizes of networks, batches, optimisers and methods stay the paper's.
FEW = {
    "overfit": "--steps 1 --test-size 50 --save-every 0",
    "overfit-all": "--steps 1 --test-size 50 --model lenet resnet44 --data cifar10",
    "inverse-error": "--steps 2",
    "inverse-hessian": "",
    "distill": "--steps 2",
    "distill --data cifar100 --validation 300": "--steps 2",
    "augment": "--train 8000 --validation 2000 --steps 1 --rows '3 Neumann'",  # the tests' CIFAR-10 has 10,000
    "lstm": "--steps 1 --rows 'many rates'",
    "split": "--steps 1 --weight-steps 1 --shares 0.5",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", FEW)
@pytest.mark.filterwarnings("ignore:the linear solve ended")
def test_the_papers_settings_run(command, tmp_path, data_folder, monkeypatch):
    # Whole test sets and texts take longer than the steps.
    monkeypatch.setattr(augment, "_measured", lambda *_: dict.fromkeys(augment._MEASURED, 0.5))
    monkeypatch.setattr(lstm.language, "perplexity", lambda model, batches: 10_000.0)
    name, *more = shlex.split(command)
    words = [
        *more,
        *shlex.split(FEW[command]),
        "--data-dir",
        str(data_folder),
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.main(["reproduce", name, "--preset", "paper", *words]) == 0
    assert runs.read_json(tmp_path / "run" / "result.json")["rows"]


def test_the_learning_rate_of_the_lstm_falls_as_in_the_paper():
    """By four, when the validation loss has not fallen for five epochs."""

    class Run:
        history = [{}]
        weight_optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 30.0)

    falling, rates = language.Falling(), []
    for value in (5.0, 4.0, 4.1, 4.1, 4.1, 4.1, 4.1, 4.1):
        Run.history[-1]["val_perplexity"] = value
        falling(Run)
        rates.append(Run.weight_optimizer.param_groups[0]["lr"])
    assert rates == [30.0] * 7 + [7.5]
