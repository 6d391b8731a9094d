"""An estimate of what the runs of `--preset paper` cost on one H200, in hours.

    python benchmarks/paper_cost.py

Networks are on the device "meta", so that nothing is computed: torch's flop counter needs the shapes only.
"""

from collections.abc import Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

import bestresponse as br
from bestresponse import _layout
from bestresponse.experiments import models
from bestresponse.experiments.augment import Augment
from bestresponse.experiments.lstm import LSTM
from bestresponse.experiments.overfit_all import OverfitAll
from bestresponse.experiments.split import Split

RATE = 4e12  # operations a second of ResNet-44's gradient on an H200, batch 256 in 39 ms: docs/performance.md
LAYER = 0.039 / 44  # seconds that each layer takes at least, by the same gradient
LSTM_GRADIENT = 0.069  # seconds, measured there
HYPER_STEP = 9  # gradients, for three products: measured there
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def seconds(model: torch.nn.Module, shape: tuple[int, ...], batch: int) -> float:
    """The estimated time of a gradient: that of its operations, or that of starting its layers if this is longer."""
    layers = sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in model.modules())
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(batch, *shape, device="meta")).sum().backward()
    return max(counter.get_total_flops() / RATE, layers * LAYER)


def rows() -> Iterator[tuple[str, float, float]]:
    """The name of each run, its gradients, and the seconds of one."""
    overfit = OverfitAll.of_preset("paper")
    with torch.device("meta"):
        for data in overfit.data:
            for name in overfit.model:
                gradient = seconds(models.make(name, SHAPES[data], 10), SHAPES[data], 50)
                yield f"overfit-all, {name}, {data}", overfit.steps * (1 + HYPER_STEP), gradient
        augment, shape = Augment.of_preset("paper"), SHAPES["cifar10"]
        network = torch.nn.Sequential(br.hyperparameters.Augmenter(), models.make(augment.network, shape, 10))
        tuned = len(augment.rows) - 1
        gradients = augment.steps * (1 + tuned * (1 + HYPER_STEP))
        yield f"augment, {len(augment.rows)} rows", gradients, seconds(network, shape, augment.batch)
        split = Split.of_preset("paper")
        # Half of the examples are in training on average; all are, when the weights are trained again.
        gradients = 2 * len(split.shares) * split.steps * (1.5 * split.weight_steps + HYPER_STEP)
        yield (
            "split",
            gradients,
            seconds(models.make("linear", SHAPES["mnist"], 10), SHAPES["mnist"], split.examples),
        )
    lstm = LSTM.of_preset("paper")
    grid = int(lstm.trials**0.5) ** 2
    gradients = lstm.steps * (1 + grid + 2 * lstm.trials + 2.4 + 2 * (1 + HYPER_STEP))
    yield f"lstm, {len(lstm.rows)} rows", gradients, LSTM_GRADIENT


if __name__ == "__main__":
    found = [
        {"run": name, "gradients": f"{number:,.0f}", "ms each": 1e3 * time, "hours": number * time / 3600}
        for name, number, time in rows()
    ]
    print(_layout.table(found))
