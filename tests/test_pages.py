"""The pages of the documentation whose code no other test runs, and that some test runs each of the others."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bestresponse as br
from pages import python_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _blocks(page):
    return python_of((DOCS / page).read_text("utf-8"))


def _run(page, names, blocks=None):
    for block in _blocks(page) if blocks is None else blocks:
        exec(compile(block, page, "exec"), names)
    return names


def test_a_test_names_each_page_with_code():
    tests = "\n".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py"))
    pages = [page.name for page in DOCS.rglob("*.md") if _blocks(page)]
    assert [page for page in pages if page not in tests] == []


def test_how_it_works_prints_what_it_promises(capsys):
    names = _run("how-it-works.md", {})
    promised = re.findall(r"^ *\d+ terms: relative error .*$", (DOCS / "how-it-works.md").read_text(), re.M)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "True"
    assert printed[1:4] == promised
    history = names["history"]
    assert len(history) == 20
    assert history[-1]["val_loss"] < names["h"].val_loss + 1e-6


def test_the_equilibrium_of_the_page_on_limits_has_the_slope_of_its_solution(capsys):
    """Two players' costs are quadratic, so that the equilibrium is the solution of a linear system."""
    _run("limits.md", {})

    def loss(rate):
        one, all_ones = torch.eye(2), torch.ones(2, 2)
        field = torch.cat(
            [torch.cat([2 * one + 2 * rate * all_ones, one], 1), torch.cat([-2 * one, 2 * one], 1)]
        )
        return torch.linalg.solve(field, torch.tensor([1.0, 1.0, 0.0, 0.0])).square().sum()

    slope = torch.func.grad(loss)(torch.tensor(0.5))
    assert capsys.readouterr().out == f"dL_V/dλ = {slope.item():.6f}\n"


@pytest.mark.filterwarnings("ignore:the loss on the watch")
def test_the_start_weighs_its_suppliers(capsys):
    pytest.importorskip("sklearn")
    torch.set_default_dtype(torch.float32)
    # The check has tests of its own, and fewer steps show the same.
    blocks = [block for block in _blocks("start.md") if "diagnostics" not in block]
    _run("start.md", {}, [b.replace("500, fresh", "150, fresh").replace("=100)", "=60)") for b in blocks])
    alone, alike, weights, weighed = capsys.readouterr().out.splitlines()
    right = [int(re.search(r"(\d+) % right", line)[1]) for line in (alone, alike, weighed)]
    assert right[2] > max(right[:2]) + 3
    careful = [float(w) for w in re.findall(r"[\d.]+", weights)]
    assert min(careful[:2]) > max(careful[2:])


@pytest.fixture
def digits():
    """A small classifier, as the names that the pages continue from."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    x, y = torch.randn(24, 5), torch.randint(3, (24,))

    def fit(model, hyper, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    decay = br.hyperparameters.WeightDecay(model)
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = (x[:12], y[:12]), (x[12:], y[12:])
    return {"torch": torch, "F": F, "br": br, "x": x, "y": y, "model": model, "decay": decay, "hyper": decay,
            "problem": problem, "train": train, "val": val, "method": br.Implicit()}  # fmt: skip


def test_the_split_of_a_loss_with_hyperparameters_is_the_loss(digits):
    class Sources(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logs = torch.nn.Parameter(torch.randn(4))

        def forward(self):
            return self.logs.exp()

    names = _run("solvers-and-curvatures.md", digits)
    sources, model, decay = Sources(), digits["model"], digits["decay"]
    decay.requires_grad_(False)

    def train_loss(model, hyper, batch):
        return names["loss"](names["predict"](model, hyper, batch), batch) + decay(model)

    problem = br.Problem(model, sources, train_loss, lambda m, h, b: F.cross_entropy(m(b[0]), b[1]))
    batch = (*digits["train"], torch.arange(12) % 4)
    split = br.Implicit(br.Exact(damping=1.0), names["method"].curvature)
    whole = br.Implicit(br.Exact(damping=1.0), br.GaussNewton(names["predict"], names["loss"]))
    one, other = (br.hypergradient(problem, batch, digits["val"], m).total["logs"] for m in (split, whole))
    assert one.norm() > 0
    assert torch.allclose(one, other)


def test_the_methods_of_the_page_on_other_methods_run(digits):
    unrolled, learned, several = _blocks("other-methods.md")

    class Settings(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.log_rate, self.logit = (torch.nn.Parameter(torch.tensor(s)) for s in (-2.0, 0.0))

    method = _run("other-methods.md", digits, [unrolled])["method"]
    fit = digits["problem"].val_loss
    of_settings = br.Problem(digits["model"], Settings(), fit, fit)
    h = br.hypergradient(of_settings, digits["train"], digits["val"], method)
    assert all(g != 0 for g in h.total.values())

    digits["method"] = br.Implicit()
    names = _run("other-methods.md", digits, [several])
    whole = br.hypergradient(digits["problem"], (digits["x"], digits["y"]), digits["val"], br.Implicit())
    assert whole.norm > 0
    assert all(torch.allclose(g, whole.total[n]) for n, g in names["h"].total.items())
    tuner = _run("other-methods.md", digits, [learned])["tuner"]
    assert len(tuner.fit([digits["train"]], [digits["val"]], 5)) == 5


def test_the_citation_and_the_changelog_are_those_of_this_version():
    assert re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == br.__version__
    assert re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1] == br.__version__
