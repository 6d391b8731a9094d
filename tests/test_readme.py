"""The README's own code and commands."""

import re
from pathlib import Path

import pytest
import torch

from pages import python_of

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.filterwarnings("error")
def test_the_python_of_the_readme_runs_and_tunes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    blocks = python_of(README.read_text(encoding="utf-8"))
    names: dict = {}
    # Fewer steps show the same.
    shorter = {"range(1000)": "range(800)", "hyper_steps=200": "hyper_steps=60"}
    for block in blocks:
        for steps, fewer in shorter.items():
            block = block.replace(steps, fewer)
        exec(compile(block, "README.md", "exec"), names)
    history = names["tuner"].history
    assert history[-1]["val_loss"] < history[0]["val_loss"]
    printed, promised = (
        [float(loss) for loss in re.findall(r"^validation loss ([\d.]+)", text, re.MULTILINE)]
        for text in (capsys.readouterr().out, README.read_text(encoding="utf-8"))
    )
    assert printed[:4] == pytest.approx(promised[:4], rel=0.05)
    assert len(promised) == 5


@pytest.mark.filterwarnings("error")
def test_the_python_of_the_page_on_cross_validation_runs(capsys):
    torch.set_default_dtype(torch.float32)
    page = README.parent / "docs" / "cross-validation.md"
    names: dict = {}
    for block in python_of(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), names)
    assert names["found"].loss == pytest.approx(2992.99, abs=0.01)
    assert "cross-validated loss 2992.99 after" in capsys.readouterr().out
    assert len(names["tuner"].history) == 10


@pytest.mark.filterwarnings("ignore:the linear solve ended", "ignore:the loss on the watch")
def test_the_python_of_the_page_on_new_data_runs():
    page = README.parent / "docs" / "new-data.md"
    torch.set_default_dtype(torch.float32)
    names: dict = {}
    loop = python_of(README.read_text(encoding="utf-8"))[0]
    exec(compile(loop.split("method = ")[0], "README.md", "exec"), names)
    watching, halving, repeated = python_of(page.read_text(encoding="utf-8"))
    exec(compile(watching.replace("=600", "=60"), page.name, "exec"), names)
    measured = [row["watch_loss"] for row in names["tuner"].history if "watch_loss" in row]
    assert names["tuner"].watch.measure(names["tuner"]) == pytest.approx(min(measured))
    exec(compile(halving.replace("=100", "=20"), page.name, "exec"), names)
    assert -1.0 <= names["tuner"].history[-1]["agreement"] <= 1.0
    names.clear()
    exec(compile(loop.split("method = ")[0], "README.md", "exec"), names)
    before = [p.detach().clone() for p in names["decay"].parameters()]
    exec(compile(repeated.replace("=500", "=50").replace("=100", "=10"), page.name, "exec"), names)
    assert (names["tuner"].weight_step, names["tuner"].hyper_step) == (100, 10)
    assert not any(torch.equal(p, q) for p, q in zip(names["decay"].parameters(), before, strict=True))


def test_the_python_of_the_page_on_influence_runs():
    page = README.parent / "docs" / "influence.md"
    torch.set_default_dtype(torch.float32)
    names: dict = {}
    for block in python_of(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), names)
    assert names["found"].scores["table"].shape == (1, 1000)
    assert [s.status for s in names["found"].solves] == ["converged"]
    assert names["own"].scores.max() <= 0.0


def test_the_python_of_the_page_on_weighing_data_runs(capsys):
    page = README.parent / "docs" / "weigh-your-data.md"
    torch.set_default_dtype(torch.float32)
    names: dict = {}
    for block in python_of(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), names)
    assert "tensor([" in capsys.readouterr().out
    assert len(names["tuner"].history) == 40
    batch = names["val"]
    assert names["train_loss"](names["model"], names["weights"], batch).requires_grad


@pytest.mark.filterwarnings("ignore:the linear solve ended", "ignore:hyper-step")
def test_the_python_of_the_page_on_runs_that_survive_runs(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "runs-that-survive.md"
    torch.set_default_dtype(torch.float32)
    names: dict = {}
    loop = python_of(README.read_text(encoding="utf-8"))[0]
    exec(compile(loop.split("method = ")[0], "README.md", "exec"), names)
    blocks = python_of(page.read_text(encoding="utf-8"))
    for block, steps in ((blocks[0], 3), (blocks[0], 5), *((block, 2) for block in blocks[1:])):
        exec(compile(block.replace("hyper_steps=100", f"hyper_steps={steps}"), page.name, "exec"), names)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 5
    assert float(names["penalty"].detach()) == pytest.approx(float(names["decay"](names["model"]).detach()))


def test_the_links_of_the_readme_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target


def test_the_python_of_the_page_for_users_of_other_libraries_runs():
    page = README.parent / "docs" / "from-other-libraries.md"
    torch.set_default_dtype(torch.float32)
    names: dict = {}
    for block in python_of(page.read_text(encoding="utf-8")):
        exec(compile(block.replace("hyper_steps=200", "hyper_steps=20"), page.name, "exec"), names)
    history = names["tuner"].history
    assert history[-1]["val_loss"] < history[0]["val_loss"]


def test_the_pages_have_their_figures_and_nothing_left_to_fill_in():
    for page in [README, *(README.parent / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"@[A-Z]+@", text), page.name
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
            assert (page.parent / target).is_file(), (page.name, target)
