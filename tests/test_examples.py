"""Each example runs, and shows what it says."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bestresponse as br

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    torch.set_default_dtype(torch.float32)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name):
    load(name).main()


def numbers(text):
    """The numbers in a printed text, in order."""
    return [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)]


def test_the_list_names_each_example_once():
    listed = re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text("utf-8"))
    there = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("notebooks/*.ipynb")]
    assert sorted(listed) == sorted(str(path.relative_to(EXAMPLES)) for path in there)


def test_each_example_is_short_and_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 100, path.name
        assert f"examples/{path.name}" in text.split('"""')[1], path.name


def cells(notebook):
    """The code of a notebook, and the texts and the number of pictures that it holds."""
    content = json.loads((EXAMPLES / "notebooks" / f"{notebook}.ipynb").read_text("utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    texts = [output for output in outputs if output["output_type"] == "stream"]
    assert not [text for text in texts if text["name"] == "stderr"]
    held = "".join("".join(text["text"]) for text in texts)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return ["".join(cell["source"]) for cell in code], held, pictures


def run_notebook(name, capsys):
    """Run the code of a notebook; return the numbers that it prints, and those that it holds."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    pyplot.close("all")
    torch.set_default_dtype(torch.float32)
    code, held, pictures = cells(name)
    names: dict = {}
    for number, cell in enumerate(code):
        exec(compile(cell, f"{name}.ipynb, code {number}", "exec"), names)
    assert len(pyplot.get_fignums()) == pictures == 1
    pyplot.close("all")
    return numbers(capsys.readouterr().out), numbers(held)


def test_best_response_in_pictures(capsys):
    found, held = run_notebook("best_response", capsys)
    assert found == pytest.approx(held, abs=2e-8)
    points, (tuned, lowest) = found[:21], found[21:]
    assert points[1::3] == pytest.approx(points[2::3], abs=2e-8)
    assert tuned == pytest.approx(lowest, abs=0.1)


@pytest.mark.slow
def test_decays_as_an_image(capsys):
    pytest.importorskip("sklearn")
    found, held = run_notebook("decays_as_an_image", capsys)
    assert found[:4] == pytest.approx(held[:4], abs=1.5)
    _, fixed, single, each, inside, outside = found
    assert each > max(fixed, single) + 5
    assert 30 * inside < outside


@pytest.mark.slow
def test_weights_of_examples(capsys):
    found, held = run_notebook("weights_of_examples", capsys)
    assert found == pytest.approx(held, abs=3)
    plain, tuned, right, wrong = found
    assert tuned > plain + 5
    assert right > 3 * wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best_response", "decays_as_an_image", "weights_of_examples"])
def test_notebooks_run_in_jupyter(name):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


def test_ridge(capsys):
    run("ridge")
    gradient, penalty, loss = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert gradient[0] == pytest.approx(gradient[1], abs=2e-10)
    assert penalty[0] == pytest.approx(penalty[1], rel=0.05)
    assert loss[0] == pytest.approx(loss[1], rel=1e-4)


def test_game(capsys):
    run("game")
    lines = capsys.readouterr().out.splitlines()
    for line in lines[:3]:
        found, right = numbers(line)
        assert found == pytest.approx(right, rel=1e-4)
    assert numbers(lines[2])[1] > numbers(lines[3])[0]
    direct, indirect = numbers(lines[4])
    assert direct == pytest.approx(-indirect, rel=1e-3)


def test_equality_constraint(capsys):
    run("equality_constraint")
    gradient, shares, variance = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert gradient[0] == pytest.approx(gradient[1], abs=2e-8)
    assert shares[1] == pytest.approx(1.0, abs=1e-12)
    assert variance[1] < 0.9 * variance[0]


def test_meta_learning(capsys):
    run("meta_learning")
    distance, *losses = capsys.readouterr().out.splitlines()
    assert numbers(distance)[0] < 1e-8
    zero, tuned, truth = (numbers(line)[1] for line in losses)
    assert truth < tuned < 0.2 * zero


def test_class_weights(capsys):
    run("class_weights")
    tuned, right, accuracies = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert tuned == pytest.approx(right, rel=0.4)
    assert accuracies[1] > accuracies[0] + 10


class Field(torch.autograd.Function):
    """Zero, with the gradient z − f in z, which is no gradient of a loss."""

    @staticmethod
    def forward(ctx, z, f):
        ctx.save_for_backward(z, f)
        return z.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        z, f = ctx.saved_tensors
        return grad * (z - f), None


def test_the_field_of_a_layer_instead_of_a_loss(verifying):
    """Other ways to write the fixed point, of which the example's text speaks."""
    example = load("equilibrium_model")
    torch.set_default_dtype(torch.float64)
    network, states, batch = example.Network(4, 2), example.States(20), example.data(20)
    with torch.no_grad():
        states.z.copy_(network.fixed_point(batch[0]))

    def detached(states, network, batch):
        z = states.z
        return 0.5 * z.square().sum() - (z * network.layer(z.detach(), batch[0])).sum()

    def field(states, network, batch):
        return Field.apply(states.z, network.layer(states.z, batch[0]))

    def found(train_loss):
        problem = br.Problem(states, network, train_loss, example.task_loss)
        method = br.Implicit(br.solvers.GMRES(100, tolerance=1e-9))
        total = br.hypergradient(problem, batch, batch, method).total
        return torch.cat([g.flatten() for g in total.values()])

    right = found(example.distance)
    with pytest.warns(br.BestResponseWarning, match="is not the gradient of train_loss"):
        wrong = found(detached)
    with pytest.warns(br.BestResponseWarning, match=r"solvers\.GMRES remains right"):
        torch.testing.assert_close(found(field), right, rtol=1e-6, atol=1e-9)
    assert float((wrong - right).norm() / right.norm()) > 0.02


@pytest.mark.slow
def test_equilibrium_model(capsys, verifying):
    run("equilibrium_model")
    distance, verified, loss, accuracy = capsys.readouterr().out.splitlines()
    assert verified == "derivatives: verified"
    assert float(distance.split()[-1]) < 1e-6
    before, after = numbers(loss)
    assert after < 0.2 * before
    assert numbers(accuracy)[0] > 80


@pytest.mark.slow
def test_lasso(capsys):
    pytest.importorskip("sklearn")
    run("lasso")
    gradient, penalty, loss, zeros = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert gradient[0] == pytest.approx(gradient[1], abs=2e-8)
    assert penalty[0] == pytest.approx(penalty[1], rel=0.3)
    assert loss[0] == pytest.approx(loss[1], rel=2e-3)
    assert abs(zeros[0] - zeros[2]) <= 5
    assert zeros[0] > 25


@pytest.mark.slow
def test_cross_validation(capsys):
    pytest.importorskip("sklearn")
    run("cross_validation")
    ours, theirs, many, _ = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert ours[0] == pytest.approx(theirs[0], rel=0.1)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    assert many[0] < ours[1] - 20


@pytest.mark.slow
def test_data_sources(capsys):
    run("data_sources")
    *errors, tuned, right = capsys.readouterr().out.splitlines()
    equal, found, known = (numbers(line)[-1] for line in errors)
    assert found < 0.2 * equal
    assert known < 0.2 * equal
    weights = [numbers(line.partition("[")[2]) for line in (tuned, right)]
    for each in weights:
        assert each[0] == max(each)
        assert sum(each[4:]) < 0.1 * sum(each)


@pytest.mark.slow
def test_noisy_labels(capsys):
    run("noisy_labels")
    weights, *accuracies = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert weights[0] > 5 * weights[1]
    everything, few, tuned, known = (each[-1] for each in accuracies)
    assert tuned > max(everything, few) + 5
    assert tuned > known - 3


@pytest.mark.slow
def test_weight_decay(capsys):
    run("weight_decay")
    *fixed, tuned, _ = (numbers(line) for line in capsys.readouterr().out.splitlines())
    losses = [loss for _, loss in fixed]
    assert len(losses) == 4
    assert tuned[0] < 0.5 * losses[1]
    assert tuned[0] < 1.05 * min(losses)


@pytest.mark.slow
def test_compiled_model(capsys):
    run("compiled_model")
    losses, refused, distance = capsys.readouterr().out.splitlines()
    before, after = numbers(losses)
    assert after < 0.9 * before
    assert "give Problem the original module or loss without torch.compile" in refused
    assert float(distance.split()[-1]) < 5e-3


@pytest.mark.slow
def test_two_processes():
    place = {"PYTHONPATH": str(Path(br.__file__).parents[1])}
    command = [sys.executable, str(EXAMPLES / "two_processes.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | place).stdout
    joined, mean, losses = shown.splitlines()
    assert float(joined.split()[-1]) < 1e-12
    assert float(mean.split()[-1]) > 0.1
    one, two = re.findall(r"\d\.\d+", losses)
    assert one == two


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_in_lightning(capsys):
    pytest.importorskip("lightning", reason="needs lightning")
    run("in_lightning")
    loss, rates, steps = capsys.readouterr().out.splitlines()[-3:]
    before, after, noise = numbers(loss)
    assert noise < after < 0.7 * before
    useful, others = numbers(rates)
    assert 10 * useful < others
    assert steps == "80 hyper-steps"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_in_transformers(capsys):
    pytest.importorskip("transformers", reason="needs transformers")
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    run("in_transformers")
    fixed, tuned = numbers(capsys.readouterr().out.splitlines()[-1])
    assert tuned < 0.95 * fixed


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
    slowest = numbers(shown.splitlines()[2])[-1]
    assert after < 0.6 * slowest


@pytest.mark.slow
def test_loss_weights(capsys):
    run("loss_weights")
    alone, equal, tuned, weights = (numbers(line) for line in capsys.readouterr().out.splitlines())
    assert tuned[0] < 0.9 * min(alone[0], equal[0])
    assert weights[0] > 10 * weights[1]


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
