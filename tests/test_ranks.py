"""Several processes: each runs the checks of `over_ranks.py`, which compare it with one process on the joined batch."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bestresponse as br

HERE = Path(__file__).parent
ALL = (
    "methods",
    "more_methods",
    "unequal_batches",
    "dropout",
    "running_statistics",
    "errors_are_shared",
    "tables",
    "one_reduction_a_product",
    "nested",
    "experts",
    "influence",
    "runs",
    "sharded",
    "sharded_batches",
    "sharded_run",
)


def started(ranks, *arguments, file=HERE / "over_ranks.py"):
    """The processes of a group that run checks, with what they write."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(br.__file__).parents[1]),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(file), *map(str, arguments)],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finished(processes):
    """What each process wrote; those that still run after some minutes are ended."""
    try:
        return [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(ranks, *arguments, **settings):
    processes = started(ranks, *arguments, **settings)
    said = finished(processes)
    assert [p.returncode for p in processes] == [0] * ranks, "\n".join(said)


def test_two_ranks_are_one_process():
    run(2, "few_methods", "errors_are_shared", "one_reduction_a_product")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_one_process(ranks):
    run(ranks, *ALL)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    run(2, "saving", tmp_path / "run")
    run(2, "resuming", tmp_path / "run")
    run(4, "resuming", tmp_path / "run")
    run(1, "resuming", tmp_path / "run")


@pytest.mark.slow
def test_a_lost_rank_ends_the_run_with_one_sentence():
    processes = started(2, "endless")
    assert "began" in processes[1].stdout.readline()
    processes[1].send_signal(signal.SIGKILL)
    said, _ = finished(processes)
    assert processes[0].returncode == 1
    assert "EvaluationError: every process of the group must answer; rank 0 of 2 got no answer" in said


@pytest.mark.slow
def test_the_python_of_the_page_runs(tmp_path):
    page = (HERE.parent / "docs" / "several-processes.md").read_text(encoding="utf-8")
    file = tmp_path / "tune.py"
    code = page.split("```python\n")[1].split("```")[0]
    file.write_text(code.replace("runs/ranks", str(tmp_path)), encoding="utf-8")
    run(2, file=file)
    rows = (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 20


def problem_of(model, **settings):
    """A ridge regression."""

    def train(model, hyper, batch):
        return val(model, hyper, batch) + hyper["l"].exp() * model.weight.square().sum()

    def val(model, hyper, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    hyper = nn.ParameterDict({"l": nn.Parameter(torch.tensor(-1.0))})
    return br.Problem(model, hyper, train, val, **settings)


def test_a_group_must_be_a_process_group():
    for group in ("gloo", 2):
        with pytest.raises(br.Error, match=r"Problem.group must be a process group.*group.WORLD"):
            problem_of(nn.Linear(3, 1), group=group)
    with pytest.raises(br.Error, match="Problem.batch_size must be a function"):
        problem_of(nn.Linear(3, 1), batch_size=3)


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
def test_the_losses_get_the_module_inside():
    model, batch = nn.Linear(3, 1), (torch.randn(8, 3), torch.randn(8, 1))
    problem, wrapped = problem_of(model), problem_of(nn.parallel.DistributedDataParallel(model))
    assert wrapped.model is model
    assert wrapped.weights.keys() == problem.weights.keys()
    one, other = (br.hypergradient(p, batch, batch, br.Implicit()).total for p in (problem, wrapped))
    assert torch.equal(one["l"], other["l"])


def test_a_problem_beside_a_group_warns():
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        with pytest.warns(
            br.BestResponseWarning, match=r"has 2 processes.*group=torch.distributed.group.WORLD"
        ):
            problem_of(nn.Linear(3, 1))
    finally:
        dist.destroy_process_group()
