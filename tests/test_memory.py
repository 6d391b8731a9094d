"""What happens when memory runs out, and estimates before it does."""

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse.solvers import capacity

CPU = torch.device("cpu")


def problem(numbers=20_000, hyperparameters=3, fail=None):
    torch.manual_seed(0)
    model = nn.Linear(numbers, 1, bias=False)
    hyper = nn.ParameterDict({"l": nn.Parameter(torch.zeros(hyperparameters))})

    def train_loss(model, hyper, batch):
        if fail is not None:
            raise fail
        return model(batch).square().mean() + hyper["l"].exp().mean() * model.weight.square().sum()

    return br.Problem(model, hyper, train_loss, lambda m, h, b: (m(b) - 1).square().mean(), verify=False)


def test_what_is_left_is_known_here():
    left = capacity.free_memory(CPU)
    assert left is None or 2**20 < left < 2**50
    assert capacity.free_memory(torch.device("meta")) is None


def test_a_container_has_its_own_limit(tmp_path):
    for name, text in (("max", "1000\n"), ("current", "900\n"), ("stat", "anon 500\nfile 300\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert capacity._of_group(str(tmp_path)) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity._of_group(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            br.Implicit(br.Exact(limit=10**9)),
            r"Exact with 20,000 weights .* 11.9 GiB .*Use ConjugateGradient",
        ),
        (br.Implicit(br.Nystrom(rank=10**6)), r"Nystrom of rank 20,000 .*Use a lower rank"),
        (br.Forward(5, 1e-3), r"Forward with 3,000 hyperparameters .*a smaller chunk"),
        (br.Unrolled(10**6, 1e-9), r"Unrolled with 1,000,000 steps .*checkpoint_every near 1000"),
    ],
    ids=["Exact", "Nystrom", "Forward", "Unrolled"],
)
def test_an_allocation_that_cannot_succeed_is_refused_before_it(method, words, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory", lambda device: 2**29)
    batch = torch.ones(2, 20_000)
    with pytest.raises(br.Error, match=words) as caught:
        br.hypergradient(problem(hyperparameters=3_000), batch, batch, method)
    assert "memory on cpu, which has 0.5 GiB left" in str(caught.value)
    assert isinstance(caught.value, MemoryError)


def test_the_largest_request_of_all_is_refused_on_any_machine():
    one = {"w": torch.ones(3_000_000)}
    with pytest.raises(br.Error, match=r"needs at least [\d.]+ TiB of memory"):
        br.Nystrom(rank=10**6).solve(lambda v: v, one)
    with pytest.raises(br.Error, match=r"needs at least [\d.]+ TiB of memory"):
        br.Exact(limit=10**9).solve(lambda v: v, one)


def test_what_fits_is_computed_as_before(monkeypatch):
    monkeypatch.setattr(capacity, "_SMALL", 1)
    batch = torch.ones(2, 50)
    for method in (
        br.Implicit(br.Exact()),
        br.Implicit(br.Nystrom(50)),
        br.Forward(2, 1e-3),
        br.Unrolled(4, 1e-3, checkpoint_every=2),
    ):
        assert br.hypergradient(problem(50), batch, batch, method).norm > 0


@pytest.mark.parametrize(
    ("method", "batch", "words"),
    [
        (br.Implicit(), torch.ones(2, 50), "Batches of smaller pieces"),
        (br.Implicit(br.Nystrom(7)), torch.ones(2, 50), "Nystrom with a rank below 7"),
        (br.Unrolled(9, 1e-3), torch.ones(2, 50), "checkpoint_every near 3"),
        (br.Unrolled(9, 1e-3, checkpoint_every=3), torch.ones(2, 50), "fewer steps; last="),
        (br.Forward(2, 1e-3), torch.ones(2, 50), "a smaller chunk"),
        (br.Implicit(), br.Batches([torch.ones(2, 50)] * 2), r"Batches\(\.\.\., recompute=True\)"),
        (br.Implicit(), br.Batches([torch.ones(2, 50)] * 2, recompute=True), "smaller Batches"),
    ],
)
def test_the_message_names_what_needs_less_here(method, batch, words):
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()):
        with pytest.raises(br.Error, match=words) as caught:
            br.hypergradient(problem(50, fail=error), batch, torch.ones(2, 50), method)
        assert "torch.utils.checkpoint" in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
    assert "MemoryError" in str(caught.value)


def test_an_allocation_of_the_model_that_fails_is_one_of_our_errors():
    def train_loss(model, hyper, batch):
        return model.weight.expand(2**45, 50).clone().sum()

    one = problem(50)
    one.train_loss = train_loss
    with pytest.raises(br.Error, match="a pass needs more memory than there is: .*What needs less"):
        br.hypergradient(one, torch.ones(2, 50), torch.ones(2, 50), br.Implicit())
