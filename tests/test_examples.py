"""Each example runs, and shows what it says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bestresponse as br

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float32)
    module.main()


@pytest.mark.slow
def test_hypernetwork(capsys):
    run("hypernetwork")
    shown = capsys.readouterr().out
    before, after = (float(x) for x in shown.splitlines()[0].removeprefix("validation loss ").split(" → "))
    assert after < 0.8 * before


@pytest.mark.slow
def test_search(capsys):
    run("search")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation loss ")]
    assert len(lines) == 2
    for line in lines:
        before, after = line.removeprefix("validation loss ").split(" by ")[0].split(" → ")
        assert float(after) < 0.5 * float(before)


@pytest.mark.slow
def test_learning_rate(capsys):
    run("learning_rate")
    shown = capsys.readouterr().out
    before, after = (float(x) for x in shown.splitlines()[0].removeprefix("validation loss ").split(" → "))
    assert after < 0.6 * before
    assert "learning rate" in shown


@pytest.mark.slow
def test_loss_weights(capsys):
    run("loss_weights")
    shown = capsys.readouterr().out
    before, after = (float(x) for x in shown.splitlines()[0].removeprefix("validation loss ").split(" → "))
    assert after < 0.1 * before


@pytest.mark.slow
def test_dropout_and_decay(capsys):
    run("dropout_and_decay")
    shown = capsys.readouterr().out
    before, after = (float(x) for x in shown.split("validation loss ")[1].split(";")[0].split(" → "))
    assert after < 0.9 * before
    assert "dropout of inputs" in shown
    assert "decay of first.weight" in shown


@pytest.mark.slow
def test_in_accelerate(capsys):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    run("in_accelerate")
    lines = capsys.readouterr().out.splitlines()
    before, after = (float(x) for x in lines[0].removeprefix("validation loss ").split(";")[0].split(" → "))
    assert after < 0.3 * before
    useful, others = (float(part.split()[-1]) for part in lines[1].split(", of the others"))
    assert 10 * useful < others
    assert lines[2] == "120 hyper-steps; restored from accelerate's checkpoint: True"


def test_own_solver(capsys):
    run("own_solver")
    norms = [line.split("norm=")[1].split(",")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(norms) == 2
    assert norms[0] == norms[1]


def test_own_curvature(capsys):
    run("own_curvature")
    norms = [line.split("norm=")[1].split(",")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(norms) == 2
    assert norms[0] == norms[1]


def test_own_method(capsys):
    run("own_method")
    line = capsys.readouterr().out.splitlines()[1]
    before, after = (float(x) for x in line.removeprefix("validation loss ").split(" → "))
    assert after < before


def test_own_hyperparameters(capsys):
    run("own_hyperparameters")
    shown = capsys.readouterr().out.splitlines()
    before, after = (float(x) for x in shown[1].removeprefix("validation loss ").split(" → "))
    assert after < before
    assert int(shown[2].split(" of ")[0]) > 5


@pytest.mark.slow
def test_accelerate_launcher():
    pytest.importorskip("accelerate")
    file = str(EXAMPLES / "accelerate_launcher.py")
    settings = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *settings.split(), file]
    place = {"PYTHONPATH": str(Path(br.__file__).parents[1]), "MASTER_PORT": "29517"}
    one, two = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | place).stdout
        for command in ([sys.executable, file], launch)
    )
    assert one.startswith("1 processes: validation loss")
    assert two.startswith("2 processes: validation loss")
    losses = [said.split("loss ")[1].split(";")[0] for said in (one, two)]
    assert losses[0] == losses[1]
