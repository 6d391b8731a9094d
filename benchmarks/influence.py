"""Influence of training examples: against retraining without each, beside two libraries, and how cost and memory grow.

    pip install kronfluence "pydvl[influence]"   # optional; each is left out if it is missing
    python benchmarks/influence.py --threads 1

"retraining": softmax regression on 4,000 images of MNIST, trained to the minimum in float64. For 50 of the images,
the weights are trained again without the image, from the minimum, and the change of the loss is compared with the
influence: on the mean loss of 500 validation images, and on the losses of five of them.

"queries": a network 784-32-10 on 20,000 images in batches of 500, and 4,000 of them for the curvature. The time of
1, 10 and 100 queries in epochs of training gradients (a gradient on each image once).

"examples": time and peak memory of a process for each number of training examples, with images drawn for each batch.

Each part prints a table, and all are written to influence.json in --out. --data-dir or BESTRESPONSE_DATA names the
folder of the data.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br
from bestresponse._layout import table
from bestresponse.cross_validation import Minimise
from bestresponse.experiments import data
from bestresponse.experiments.runs import versions, write_whole
from bestresponse.hyperparameters import Weights

DECAY = 1e-2
Batch = tuple[Tensor, Tensor, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 10))


class Decay:
    """DECAY / 2 ‖w‖², which knows its curvature, so that KFAC's inverse has it."""

    def __call__(self, model: nn.Module, *_: Any) -> Tensor:
        return DECAY / 2 * torch.stack([w.square().sum() for w in model.parameters()]).sum()

    forward = __call__

    def curvature_diagonal(self, model: nn.Module) -> dict[str, Tensor]:
        return {n: torch.full_like(w, DECAY) for n, w in model.named_parameters()}


decay = Decay()


def predict(model: nn.Module, weights: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch[1]), weights(batch[0])


def weighted_loss(outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    return (outputs[1] * F.cross_entropy(outputs[0], batch[2], reduction="none")).mean()


def train_loss(model: nn.Module, weights: nn.Module, batch: Batch) -> Tensor:
    return weighted_loss(predict(model, weights, batch), batch) + decay(model)


def val_loss(model: nn.Module, weights: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


PARTS = predict, weighted_loss, decay
METHODS: dict[str, Callable[[], br.Implicit]] = {
    "Hessian, conjugate gradient": lambda: br.Implicit(br.ConjugateGradient(300, tolerance=1e-3, recycle=30)),
    "Gauss-Newton, conjugate gradient": lambda: br.Implicit(
        br.ConjugateGradient(300, tolerance=1e-3, recycle=500), br.GaussNewton(*PARTS)
    ),
    "KFAC": lambda: br.Implicit(
        br.ConjugateGradient(50, tolerance=1e-2, preconditioner=br.KFAC(*PARTS, steady=0.0)), br.KFAC(*PARTS)
    ),
}


def batches_of(x: Tensor, y: Tensor, size: int = 500) -> list[Batch]:
    index = torch.arange(len(x))
    return [(i, x[i], y[i]) for i in index.split(size)]


class Trained:
    """The network at the minimum of its training loss, with a weight for each image."""

    def __init__(
        self, make: Callable[[], nn.Module], images: data.Images, count: int, dtype: torch.dtype, steps: int
    ) -> None:
        (x, y), (self.val_x, self.val_y) = images.draw(count, 500, seed=0)
        self.x, self.y = x.flatten(1).to(dtype), y
        self.val_x = self.val_x.flatten(1).to(dtype)
        self.model, self.weights = make().to(dtype), Weights(count, "clamp", dtype=dtype)
        self.problem = br.Problem(self.model, self.weights, train_loss, val_loss, verify=False)
        self.whole = (torch.arange(count), self.x, self.y)
        self.train(steps)

    def train(self, steps: int) -> None:
        Minimise(max_steps=steps, newton_limit=0, tolerance=1e-14)(self.problem, self.whole)

    def queries(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return [(self.val_x[i : i + 1], self.val_y[i : i + 1]) for i in range(count)]

    @torch.no_grad()
    def losses(self, queries: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([val_loss(self.model, self.weights, query) for query in queries])


def retraining(images: data.Images, removed: int = 50) -> list[dict[str, Any]]:
    """The correlation of each method's influence with the changes of retraining."""
    setting = Trained(regression, images, 4_000, torch.float64, steps=2_000)
    queries = [(setting.val_x, setting.val_y), *setting.queries(5)]
    chosen = torch.randperm(4_000, generator=torch.Generator().manual_seed(1))[:removed]
    start = {n: w.clone() for n, w in setting.model.state_dict().items()}
    before, changes = setting.losses(queries), []
    for i in chosen.tolist():
        setting.weights.table.data[i] = 0.0
        setting.train(300)
        changes.append(setting.losses(queries) - before)
        setting.weights.table.data[i] = 1.0
        setting.model.load_state_dict(start)
    actual = torch.stack(changes, dim=1)
    found: dict[str, tuple[Tensor, float]] = {}
    for name, method in METHODS.items():
        began = time.process_time()
        scores = br.influence(setting.problem, batches_of(setting.x, setting.y), queries, method()).scores
        found[name] = -scores["table"][:, chosen], time.process_time() - began
    found.update(kronfluence(setting, queries, chosen))
    found.update(pydvl(setting, queries, chosen))
    rows = []
    for name, (predicted, seconds) in found.items():
        true = actual[-len(predicted) :]  # without the mean loss, if the method leaves it out
        pairs = list(zip(predicted, true, strict=True))
        of_each = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs]
        slope = float((predicted * true).sum() / true.square().sum())
        rows.append(
            {
                "method": name,
                "correlation, mean loss": of_each[0] if len(predicted) == len(queries) else None,
                "one image": sum(of_each[-5:]) / 5,
                "slope": slope,
                "seconds": seconds,
            }
        )
    return rows


def kronfluence(
    setting: Trained, queries: list[tuple[Tensor, Tensor]], chosen: Tensor
) -> dict[str, tuple[Tensor, float]]:
    """The same by kronfluence, whose scores are positive where an image helps, for a sum over images."""
    if find_spec("kronfluence") is None:
        return {}
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from torch.utils.data import TensorDataset

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = batch[1]
            if sample:
                labels = torch.multinomial(logits.detach().softmax(1), 1).flatten()
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    found = {}
    for strategy in ("ekfac", "kfac"):
        model, task = regression().to(setting.x.dtype), Classification()
        model.load_state_dict(setting.model.state_dict())
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            analyzer = Analyzer(
                "influence", prepare_model(model, task), task, cpu=True, output_dir=folder,
                disable_tqdm=True, disable_model_save=True,
            )  # fmt: skip
            train, val = TensorDataset(setting.x, setting.y), TensorDataset(setting.val_x, setting.val_y)
            factors = FactorArguments(strategy=strategy)
            analyzer.fit_all_factors("factors", train, factor_args=factors, per_device_batch_size=500)
            analyzer.compute_pairwise_scores(
                "scores", "factors", val, train, per_device_query_batch_size=100,
                per_device_train_batch_size=500, score_args=ScoreArguments(damping_factor=DECAY),
            )  # fmt: skip
            scores = analyzer.load_pairwise_scores("scores")["all_modules"]
        each = torch.cat([scores.mean(0)[None], scores[: len(queries) - 1]]).to(setting.x.dtype)
        name = f"kronfluence, {strategy.upper()}"
        found[name] = each[:, chosen] / len(setting.x), time.process_time() - began
    return found


def pydvl(
    setting: Trained, queries: list[tuple[Tensor, Tensor]], chosen: Tensor
) -> dict[str, tuple[Tensor, float]]:
    """The same by pyDVL, whose scores have kronfluence's sign and scale; its solves are for single images."""
    if find_spec("pydvl") is None:
        return {}
    from pydvl.influence.torch import CgInfluence, EkfacInfluence
    from torch.utils.data import DataLoader, TensorDataset

    model = regression().to(setting.x.dtype)
    model.load_state_dict(setting.model.state_dict())
    loader = DataLoader(TensorDataset(setting.x, setting.y), batch_size=500)
    train = setting.x[chosen], setting.y[chosen]
    images = tuple(torch.cat(part) for part in zip(*queries[1:], strict=True))
    found = {}
    began = time.process_time()
    solved = CgInfluence(model, F.cross_entropy, DECAY, rtol=1e-3, maxiter=300).fit(loader)
    scores = solved.influences(*images, *train)
    found["pyDVL, conjugate gradient"] = scores.detach() / len(setting.x), time.process_time() - began
    # Its EKFAC is for float32 alone.
    single = DataLoader(TensorDataset(setting.x.float(), setting.y), batch_size=500)
    train, images = ((x.float(), y) for x, y in (train, images))
    began = time.process_time()
    factored = EkfacInfluence(model.float(), update_diagonal=True, hessian_regularization=DECAY).fit(single)
    whole = factored.influences(setting.val_x.float(), setting.val_y, *train).mean(0)
    scores = torch.cat([whole[None], factored.influences(*images, *train)]).to(setting.x.dtype)
    found["pyDVL, EKFAC"] = scores.detach() / len(setting.x), time.process_time() - began
    return found


def many_queries(images: data.Images) -> list[dict[str, Any]]:
    """The time of 1, 10 and 100 queries in epochs of training gradients."""
    setting = Trained(network, images, 20_000, torch.float32, steps=150)
    batches = batches_of(setting.x, setting.y)
    weights = list(setting.problem.weights.values())

    def epoch() -> float:
        began = time.process_time()
        for batch in batches:
            torch.autograd.grad(train_loss(setting.model, setting.weights, batch), weights)
        return time.process_time() - began

    unit = min(epoch() for _ in range(5))
    part = tuple(x[:4_000] for x in setting.whole)
    rows = []
    for name, method in METHODS.items():
        if "Hessian" in name:  # indefinite before the minimum
            continue
        row: dict[str, Any] = {"method": name}
        for count in (1, 10, 100):
            began = time.process_time()
            found = br.influence(setting.problem, batches, setting.queries(count), method(), solve_on=part)
            row[f"{count} quer{'y' if count == 1 else 'ies'}"] = (time.process_time() - began) / unit
        row["100 / 1"] = row["100 queries"] / row["1 query"]
        row["products a query"] = sum(s.products for s in found.solves) / len(found.solves)
        row["solves"] = ", ".join(sorted({str(s.status) for s in found.solves}))
        rows.append(row)
    return rows


class Drawn:
    """Batches of random images, made when they are read."""

    def __init__(self, count: int, size: int = 1_000) -> None:
        self.count, self.size = count, size

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for index in torch.arange(self.count).split(self.size):
            x = torch.randn(len(index), 784, generator=generator)
            yield index, x, torch.randint(10, (len(index),), generator=generator)


def one_size(count: int) -> dict[str, Any]:
    """Time and peak memory for a number of examples, in this process."""
    model, weights = network(), Weights(count, "clamp")
    problem = br.Problem(model, weights, train_loss, val_loss, verify=False)
    stream = Drawn(count)
    first = next(iter(stream))
    query = torch.randn(10, 784), torch.randint(10, (10,))
    began = time.process_time()
    br.influence(problem, stream, [query], METHODS["Gauss-Newton, conjugate gradient"](), solve_on=first)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"examples": count, "seconds": seconds, "peak of the process [MiB]": peak}


def many_examples() -> list[dict[str, Any]]:
    """A row for each number of examples, each from its own process."""
    rows = []
    for count in (1_000, 100_000, 1_000_000):
        command = [sys.executable, __file__, "--one-size", str(count)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", default=["retraining", "queries", "examples"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/influence"))
    parser.add_argument("--one-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one_size:
        print(json.dumps(one_size(options.one_size)))
        return
    warnings.simplefilter("ignore", br.BestResponseWarning)
    images = data.load("mnist", options.data_dir)
    found: dict[str, Any] = {}
    for part in options.parts:
        print(f"\n{part}")
        run = {
            "retraining": lambda: retraining(images),
            "queries": lambda: many_queries(images),
            "examples": many_examples,
        }
        found[part] = run[part]()
        print(table(found[part]))
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(
        options.out / "influence.json",
        json.dumps({**found, "threads": options.threads, "versions": versions()}, indent=1),
    )


if __name__ == "__main__":
    main()
