"""Kill runs at random moments and during writes, let each go on, and compare the results.

``python killed_runs.py FOLDER SEED``

A parent that never computes forks the runs, so that each starts at once.
"""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse import _files as files

STEPS, KILLS, IN_WRITES, MOST = 16, 40, 10, 8  # the most kills of one run


def run(folder):
    """A run of so many hyper-steps, from its saved state if there is one."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
    decay = br.hyperparameters.WeightDecay(model, per="weight", initial=0.01)

    def fit(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit, verify=False)
    weights = torch.optim.Adam(problem.weights.values(), 0.01)
    hyper = torch.optim.Adam(problem.hyperparameters.values(), 0.05)
    path, rows = folder / "run.pt", folder / "rows.jsonl"
    more = [
        br.callbacks.KeepBest(),
        br.callbacks.JSONLines(rows),
        br.callbacks.Checkpoint(path, every=2, keep=2),
    ]
    tuner = br.Tuner(problem, weights, hyper, br.Implicit(), weight_steps=2, callbacks=more, policy="return")
    if path.exists() or path.with_name("run.pt.previous").exists():
        tuner.load(path)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
    tuner.fit(data, data, STEPS - tuner.hyper_step)


def child(folder, at=None):
    """Fork a run; with a number, it kills itself at this file operation."""
    number = os.fork()
    if number:
        return number
    try:
        warnings.simplefilter("ignore")
        if at is not None:
            kill_at(at)
        run(folder)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def kill_at(operation):
    """Die before, within or after the operation of a file with this number."""
    left = [operation]

    def watched(function, inside=None):
        def call(*arguments):
            left[0] -= 1
            if left[0] == 0 and inside is not None:
                inside(*arguments)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    opened = Path.open

    def opening(self, *arguments, **more):
        file = opened(self, *arguments, **more)
        return Watched(file, watched) if ".part" in self.name or self.suffix == ".jsonl" else file

    files.Path.open = opening
    files.os.fsync, files.os.link = watched(os.fsync), watched(os.link)
    files.Path.replace = watched(Path.replace)


class Watched:
    """A file whose writes are operations."""

    def __init__(self, file, watched):
        self.file = file
        self.write = watched(
            file.write, lambda data: (file.write(bytes(data)[: len(data) // 2]), file.flush())
        )

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        self.file.close()


def result(folder):
    """Everything of a finished run but the times, as text."""
    content = torch.load(folder / "run.pt", weights_only=True)
    content["progress"]["history"] = [{**row, "seconds": 0} for row in content["progress"]["history"]]
    content["callbacks"] = [[name, {**state, "row": 0, "path": 0}] for name, state in content["callbacks"]]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return repr(flat(content)), [{**row, "seconds": 0} for row in rows]


def flat(value):
    """Tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return [(key, flat(x)) for key, x in value.items()]
    return [flat(x) for x in value] if isinstance(value, list | tuple) else value


def main(folder, seed):
    """Kill 40 runs, 10 of them during writes; each goes on until it is finished or killed again."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    (folder / "whole").mkdir()
    began = time.monotonic()
    assert os.waitpid(child(folder / "whole"), 0)[1] == 0
    length, expected = time.monotonic() - began, result(folder / "whole")
    kills, writes, finished, number = 0, 0, 0, 0
    while kills < KILLS:
        place = folder / f"run-{number}"
        number += 1
        place.mkdir()
        begun = kills
        while True:
            within = writes < IN_WRITES and rng.random() < 0.5
            last = kills >= KILLS or kills >= begun + MOST
            one = child(place, rng.randrange(1, 80) if within and not last else None)
            if not within and not last:
                time.sleep(rng.random() * length)
                os.kill(one, signal.SIGKILL)
            status = os.waitpid(one, 0)[1]
            if os.WIFSIGNALED(status):
                kills, writes = kills + 1, writes + within
                continue
            assert status == 0, f"{place} ended with {status}"
            break
        finished += 1
        assert result(place) == expected, f"{place} differs"
    print(
        json.dumps(
            {"kills": kills, "in writes": writes, "runs": finished, "seconds": time.monotonic() - began}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
