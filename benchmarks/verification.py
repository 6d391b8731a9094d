"""What the verification of a problem's first hypergradient costs, once, in training gradients.

Processor time of a first hypergradient with verification less that without, over that of a training gradient; batches
of 128. The difference of medians over --repeats.

    python benchmarks/verification.py --threads 1

prints one table.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse._layout import table


def networks() -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    for kink in (nn.ReLU, nn.Tanh):
        yield (
            f"784-128-10, {kink.__name__}",
            nn.Sequential(nn.Linear(784, 128), kink(), nn.Linear(128, 10)),
            (784,),
        )
    convolutions = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(3200, 10)),
    )
    yield "two convolutions, batch norm", convolutions, (1, 28, 28)
    wide = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(
            layer
            for _ in range(3)
            for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        ),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)),
    )
    yield "four convolutions of 64 channels", wide, (3, 32, 32)


def fit(model: nn.Module, hyper: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def methods(decay: nn.Module) -> dict[str, Callable[[], br.Method]]:
    predict, loss = lambda m, h, b: m(b[0]), lambda o, b: F.cross_entropy(o, b[1])
    two = br.ConjugateGradient(2, damping=1.0)
    return {
        "Hessian": lambda: br.Implicit(two),
        "GaussNewton": lambda: br.Implicit(two, br.GaussNewton(predict, loss, decay)),
        "Unrolled(3)": lambda: br.Unrolled(3, 0.1),
    }


def cost(network: nn.Module, shape: tuple[int, ...], name: str, repeats: int) -> float:
    batch = torch.randn(128, *shape), torch.randint(10, (128,))
    decay = br.hyperparameters.WeightDecay(network, per="tensor")

    def problem(verify: bool) -> br.Problem:
        return br.Problem(network, decay, lambda m, h, b: fit(m, h, b) + h(m), fit, verify=verify)

    def gradient() -> None:
        plain = problem(False)
        torch.autograd.grad(
            plain.train_loss(network, decay, batch), list(plain.weights.values()), allow_unused=True
        )

    def first(verify: bool) -> None:
        br.hypergradient(problem(verify), batch, batch, methods(decay)[name]())

    runs: dict[str, Callable[[], None]] = {
        "gradient": gradient,
        "with": lambda: first(True),
        "without": lambda: first(False),
    }
    taken: dict[str, list[float]] = {key: [] for key in runs}
    for number in range(repeats + 1):
        for key, run in runs.items():
            began = time.process_time()
            run()
            if number:
                taken[key].append(time.process_time() - began)
    median = {key: statistics.median(times) for key, times in taken.items()}
    return (median["with"] - median["without"]) / median["gradient"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for network, module, shape in networks():
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            module.to(dtype)
            row: dict[str, object] = {"network": network, "precision": str(dtype).removeprefix("torch.")}
            row |= {name: cost(module, shape, name, options.repeats) for name in methods(module)}
            rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
