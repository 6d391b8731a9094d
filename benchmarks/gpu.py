"""What must hold on a GPU, and what a hypergradient costs there. Prepared to run whole in a few minutes.

    python benchmarks/gpu.py --out runs/gpu

checks that hypergradients on the GPU equal those in float64 on the CPU for a convolutional network, an LSTM and a
transformer; that operations without a second derivative there (cuDNN's LSTM, fused attention, compiled modules) are
replaced or refused, and do not go wrong; that dropout masks are replayed and the device's random state is put back;
measures the time and the peak memory of hypergradients in units of one training gradient; and runs the paper's two
large experiments for --seconds each, on CIFAR-10 and the Penn TreeBank from the folder that BESTRESPONSE_DATA names, or
on small stand-ins. It ends with its tables, and writes gpu.json into --out; the exit status counts the checks that
failed.

    python benchmarks/gpu.py --dry-run

does the same with small networks on the CPU, where what is special to a GPU passes without being tested.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bestresponse as br
from bestresponse._layout import table
from bestresponse.diagnostics import measuring
from bestresponse.experiments import data, models, text
from bestresponse.experiments.augment import Augment
from bestresponse.experiments.classification import Batch, output_loss, predict, train_loss, val_loss
from bestresponse.experiments.cost import peak_bytes
from bestresponse.experiments.lstm import LSTM
from bestresponse.experiments.runs import read_rows, versions, write_whole

METHODS: dict[str, Callable[[br.Problem], br.Method]] = {
    "Neumann, 10 terms": lambda problem: br.Implicit(br.Neumann(terms=10, scale=0.01)),
    "Gauss-Newton, 4 steps": lambda problem: br.Implicit(
        br.ConjugateGradient(max_steps=4, damping=0.1),
        br.GaussNewton(predict, output_loss, rest=problem.hyper),
    ),
}


class Recurrent(nn.Module):
    """An LSTM language model of plain operations, [time, batch] of words to logits: one product for each time step."""

    def __init__(self, words: int, units: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.inputs = nn.ModuleList(nn.Linear(units, 4 * units) for _ in range(layers))
        self.hidden = nn.ModuleList(nn.Linear(units, 4 * units, bias=False) for _ in range(layers))
        self.decoder = nn.Linear(units, words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for inputs, hidden in zip(self.inputs, self.hidden, strict=True):
            h = c = torch.zeros_like(x[0])
            outputs = []
            for gates in inputs(x):
                i, f, g, o = (gates + hidden(h)).chunk(4, dim=1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                outputs.append(h)
            x = torch.stack(outputs)
        logits: Tensor = self.decoder(x)
        return logits


class Transformer(nn.Module):
    """A causal transformer language model, [batch, time] of words to logits."""

    def __init__(self, words: int, units: int, layers: int, longest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.position = nn.Parameter(0.02 * torch.randn(longest, units))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                units, units // 32, 4 * units, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.decoder = nn.Linear(units, words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.position[: words.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.decoder(x)
        return logits


class CuDNN(nn.Module):
    """Torch's own LSTM."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(units, units)
        self.decoder = nn.Linear(units, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.lstm(x)[0][-1])
        return logits


class Under(nn.Module):
    """A network under autocast to bfloat16, or with attention of plain operations."""

    def __init__(self, inner: nn.Module, autocast: bool, plain: bool) -> None:
        super().__init__()
        self.inner, self.autocast, self.plain = inner, autocast, plain

    def forward(self, x: Tensor) -> Tensor:
        weight = next(self.inner.parameters())
        kernels = [SDPBackend.MATH] if self.plain else [*SDPBackend.__members__.values()][1:]
        with torch.autocast(weight.device.type, torch.bfloat16, self.autocast), sdpa_kernel(kernels):
            logits: Tensor = self.inner(x)
        return logits.to(weight.dtype).flatten(0, -2)


@dataclass(frozen=True)
class Case:
    """A network with its training and validation batch, both on the CPU."""

    model: nn.Module
    train: Batch
    val: Batch

    def problem(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
        plain: bool = True,
    ) -> tuple[br.Problem, Batch, Batch]:
        """On a device; ``autocast``: in bfloat16; ``plain``: with attention of plain operations."""
        model = Under(self.model.to(device, dtype), autocast, plain)
        decay = br.hyperparameters.WeightDecay(model, initial=1e-3)
        problem = br.Problem(model, decay, train_loss, val_loss)
        return problem, moved(self.train, device, dtype), moved(self.val, device, dtype)


def moved(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in batch)


def convolutional(n: int) -> Case:
    """The 44-layer residual network, batch norm in training mode, on 3×32×32 images."""
    batches = [(torch.randn(n, 3, 32, 32), torch.randint(10, (n,))) for _ in range(2)]
    return Case(models.resnet44((3, 32, 32), 10), *batches)


def normalised() -> Case:
    """A small convolutional network, batch norm in training mode."""
    batches = [(torch.randn(32, 3, 16, 16), torch.randint(10, (32,))) for _ in range(2)]
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]
    return Case(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10)), *batches)


def recurrent(words: int, units: int, steps: int, n: int) -> Case:
    text = torch.randint(words, (2, steps + 1, n))
    return Case(Recurrent(words, units), *((piece[:-1], piece[1:].flatten()) for piece in text))


def transformer(words: int, units: int, layers: int, steps: int, n: int) -> Case:
    text = torch.randint(words, (2, n, steps + 1))
    return Case(
        Transformer(words, units, layers, steps), *((piece[:, :-1], piece[:, 1:].flatten()) for piece in text)
    )


# As torch comes; without TensorFloat-32 in convolutions; and a compiled module, which has no second derivative, by
# differences of its gradients.
MODES = ("default", "full float32", "bfloat16 autocast", "compiled")


def seeded(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


SMALL: dict[str, Callable[[], Case]] = {
    "convolutional": normalised,
    "LSTM": lambda: recurrent(200, 64, 20, 8),
    "transformer": lambda: transformer(200, 64, 2, 32, 4),
}
LARGE: dict[str, Callable[[], Case]] = {
    "transformer 6×384, vocabulary 10,000, 16×256": lambda: transformer(10_000, 384, 6, 256, 16),
    "ResNet-44, batch 256": lambda: convolutional(256),
    "LSTM 2×650, vocabulary 10,000, 70×40": lambda: recurrent(10_000, 650, 70, 40),
}


def hypergradient(
    problem: br.Problem, train: Batch, val: Batch, method: br.Method, seed: int | None = None
) -> Tensor:
    """The whole hypergradient as one float64 vector on the CPU."""
    total = br.hypergradient(problem, train, val, method, seed=seed).total
    return torch.cat([g.double().cpu().flatten() for g in total.values()])


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32, and not in TensorFloat-32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def agreement(device: torch.device, name: str, method_name: str) -> dict[str, Any]:
    """Relative distances to the hypergradient of the same method in float64 on the CPU."""
    case, cpu = seeded(SMALL[name]), torch.device("cpu")

    def on(device: torch.device, dtype: torch.dtype = torch.float32, autocast: bool = False) -> Tensor:
        problem, train, val = case.problem(device, dtype, autocast)
        return hypergradient(problem, train, val, METHODS[method_name](problem))

    start = {k: v.clone() for k, v in case.model.state_dict().items()}
    exact = on(cpu, torch.float64)
    case.model.float().load_state_dict(start)
    row: dict[str, Any] = {"network": name, "method": method_name, "CPU float32": relative(on(cpu), exact)}
    with full_precision():
        row["GPU float32"] = relative(on(device), exact)
    row["GPU TensorFloat-32"] = relative(on(device), exact)
    row["GPU bfloat16 autocast"] = relative(on(device, autocast=True), exact)
    row["passed"] = row["GPU float32"] < 1e-4
    return row


def check(name: str, function: Callable[[torch.device], str], device: torch.device) -> dict[str, Any]:
    """A row that says what came of a check; an error fails it."""
    try:
        return {"check": name, "found": function(device), "passed": True}
    except Exception as error:
        return failed(name, error)


def failed(name: str, error: Exception) -> dict[str, Any]:
    return {"check": name, "found": f"{type(error).__name__}: {error}".splitlines()[0][:160], "passed": False}


def refused_or_right(device: torch.device, case: Case, plain: bool) -> str:
    """A second derivative that is missing raises an error of ours; one that is there agrees with float64."""
    method = br.Implicit(br.Neumann(terms=10, scale=0.01))
    with full_precision():
        try:
            found = hypergradient(*case.problem(device, plain=plain), method)
        except br.Error as error:
            return f"refused: {str(error)[:110]}"
    exact = hypergradient(*case.problem(torch.device("cpu"), torch.float64), method)
    distance = relative(found, exact)
    assert distance < 1e-4, f"silently wrong: {distance:.1e}"
    return f"right: {distance:.0e}"


def torch_lstm() -> Case:
    batches = [(torch.randn(12, 8, 32), torch.randint(10, (8,))) for _ in range(2)]
    return Case(CuDNN(32), *batches)


def cudnn(device: torch.device) -> str:
    return refused_or_right(device, seeded(torch_lstm), plain=True)


def without_cudnn(device: torch.device) -> str:
    with torch.backends.cudnn.flags(enabled=False):
        return refused_or_right(device, seeded(torch_lstm), plain=True)


def fused_attention(device: torch.device) -> str:
    return refused_or_right(device, seeded(SMALL["transformer"]), plain=False)


def differences(device: torch.device) -> str:
    """The model as it is, fused attention and all, by differences of its gradients."""
    case, differences = seeded(SMALL["transformer"]), br.FiniteDifference()
    methods = [
        br.Implicit(br.Neumann(terms=3, scale=0.01), curvature) for curvature in (br.Hessian(), differences)
    ]
    exact = hypergradient(*case.problem(torch.device("cpu"), torch.float64), methods[0])
    with full_precision():
        found = hypergradient(*case.problem(device, plain=False), methods[1])
    distance = relative(found, exact)
    assert distance < 2e-2, f"{distance:.1e} from float64"
    return f"{distance:.0e} from float64"


def compiled(device: torch.device) -> str:
    case = seeded(SMALL["convolutional"])
    model: Any = torch.compile(case.model.to(device))
    return refused_or_right(device, Case(model, case.train, case.val), plain=True)


def dropout(device: torch.device) -> str:
    """The same masks in every pass: two calls with a seed agree, and leave the device's random state as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    problem, train, val = Case(model, *[(torch.randn(64, 32), torch.randint(10, (64,)))] * 2).problem(device)
    torch.manual_seed(1)
    expected = torch.rand(8, device=device)
    torch.manual_seed(1)
    method = METHODS["Gauss-Newton, 4 steps"](problem)
    first, second = (hypergradient(problem, train, val, method, seed=5) for _ in range(2))
    assert torch.equal(torch.rand(8, device=device), expected), "the device's random state has moved"
    assert relative(first, second) < 1e-5, f"two calls differ by {relative(first, second):.1e}"
    # The masks are one linear map for the whole call, so its products are those of a symmetric matrix.
    with problem.undisturbed(seed=5) as passes:
        system = br.Hessian().linearise(passes, train)
        v, u = ({k: torch.randn_like(w) for k, w in problem.weights.items()} for _ in range(2))
        left, right = (sum(float((a[k] * system(b)[k]).sum()) for k in a) for a, b in ((v, u), (u, v)))
    assert abs(left - right) < 1e-3 * abs(left), f"uᵀAv = {left}, vᵀAu = {right}"
    return f"two calls differ by {relative(first, second):.0e}"


def resumed(device: torch.device, folder: Path) -> str:
    """A run that is saved and goes on ends as one that was never stopped."""

    def tuner() -> br.Tuner:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 10))
        batch = (torch.randn(64, 32), torch.randint(10, (64,)))
        problem, train, val = Case(model, batch, batch).problem(device)
        made = br.Tuner(
            problem,
            torch.optim.Adam(problem.weights.values(), 1e-3),
            torch.optim.RMSprop(problem.hyperparameters.values(), 1e-2),
        )
        batches.append(([train], [val]))
        return made

    batches: list[tuple[list[Batch], list[Batch]]] = []
    whole = tuner()
    whole.fit(*batches[0], 8)
    first = tuner()
    first.fit(*batches[1], 4)
    first.save(folder / "run.pt")
    second = tuner()
    second.load(folder / "run.pt")
    second.fit(*batches[2], 4)
    (folder / "run.pt").unlink()
    ends = [torch.cat([p.detach().flatten() for p in t.problem.weights.values()]) for t in (whole, second)]
    distance = relative(*(end.double().cpu() for end in ends))
    assert distance < 1e-6, f"the resumed run ends {distance:.1e} away"
    return f"{distance:.0e} away from the whole run"


def synchronised(device: torch.device, function: Callable[[], object]) -> Callable[[], None]:
    """The function, until the device has done what it asked for."""

    def run() -> None:
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return run


def cost(
    device: torch.device, name: str, mode: str, cases: dict[str, Callable[[], Case]], repeats: int
) -> dict[str, Any]:
    """Time and memory of a hypergradient by its products K, beside one training gradient of the same mode."""
    case = seeded(cases[name])
    if mode == "compiled":
        module: Any = torch.compile(case.model.to(device))
        case = Case(module, case.train, case.val)
    problem, train, val = case.problem(device, autocast=mode == "bfloat16 autocast", plain=mode != "compiled")
    curvature = br.FiniteDifference() if mode == "compiled" else br.Hessian()
    weights = list(problem.weights.values())

    def gradient() -> None:
        torch.autograd.grad(problem.train_loss(problem.model, problem.hyper, train), weights)

    def of(products: int) -> Callable[[], object]:
        method = br.Implicit(br.Neumann(products, scale=1e-3), curvature, estimate_error=False)
        return lambda: br.hypergradient(problem, train, val, method)

    work = {"gradient": gradient, **{str(k): of(k) for k in (1, 3, 10)}}
    work = {key: synchronised(device, function) for key, function in work.items()}
    seconds = measuring.seconds(work, repeats)
    peaks = {}
    for key, function in work.items():
        peaks[key] = peak_bytes(device, function)
    unit, bytes_ = seconds["gradient"], peaks["gradient"]
    row: dict[str, Any] = {"network": name, "mode": mode, "gradient [ms]": 1e3 * unit}
    row |= {f"K={k}": seconds[str(k)] / unit for k in (1, 3, 10)}
    row["a product"] = (seconds["10"] - seconds["3"]) / 7 / unit
    if device.type == "cuda" and bytes_:
        row |= {
            "gradient [MiB]": bytes_ / 2**20,
            **{f"memory K={k}": (peaks[str(k)] or 0) / bytes_ for k in (1, 10)},
        }
    return row


class OutOfTime(Exception):
    """Ends a run."""


def until(seconds: float) -> Callable[[br.Tuner], None]:
    """A callback that ends a run so many seconds after its first hyper-step."""
    first: list[float] = []

    def watch(_: br.Tuner) -> None:
        first.append(time.perf_counter())
        if first[-1] - first[0] > seconds:
            raise OutOfTime

    return watch


def epochs(device: torch.device, experiment: str, dry: bool, seconds: float, folder: Path) -> dict[str, Any]:
    """As much as fits of an experiment: epochs of weight steps, and the mean losses of the first and last tenth."""
    present = data.find(data.folder_of(None), "cifar10_subset.npz", "cifar10.npz") is not None and not dry
    preset = "paper" if present else "smoke"
    if experiment == "augment":
        sizes = {"train": 8000, "validation": 2000} if present else {"steps": 10**6}
        images = dataclasses.replace(Augment.of_preset(preset), seeds=1, rows=("3 Neumann",), **sizes)
        (cell,) = images.tasks(device, folder)
        batches, name = images.train // images.batch, f"augment, {images.network}, {images.data}"
    else:
        words = dataclasses.replace(LSTM.of_preset(preset), seeds=1, rows=("7 rates",), steps=10**7)
        (cell,) = words.tasks(device, folder)
        corpus = text.load(words.data, None, words.words, words.train_words)
        batches = len(corpus.train) // (words.batch * words.length)
        name = f"lstm, {words.units} units, {words.data}"
    with suppress(OutOfTime):
        list(dataclasses.replace(cell, watch=[until(seconds)])())
    rows = read_rows(cell.folder)
    tenth, made = max(1, len(rows) // 10), rows[-1]["weight_step"] / batches
    row: dict[str, Any] = {"experiment": name, "hyper-steps": len(rows), "epochs": made}
    row["seconds an epoch"] = rows[-1]["seconds"] / made
    for key in ("train_loss", "val_loss"):
        for which, part in (("first", rows[:tenth]), ("last", rows[-tenth:])):
            row[f"{key.replace('_', ' ')}, {which}"] = sum(r[key] for r in part) / tenth
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="small networks on the CPU")
    parser.add_argument("--repeats", type=int, default=10, help="counted rounds; the median is reported")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of the two experiments")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder to write to")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a GPU that torch sees; torch.cuda.is_available() is False. Or give --dry-run.")
    device = torch.device("cpu" if options.dry_run else "cuda")
    card = "no GPU (dry run)" if options.dry_run else torch.cuda.get_device_name()
    options.out.mkdir(parents=True, exist_ok=True)
    tables = ("agreement", "checks", "cost", "epochs")
    result: dict[str, Any] = {"card": card, "versions": versions(), **{key: [] for key in tables}}

    def report(key: str, row: dict[str, Any]) -> None:
        result[key].append(row)
        write_whole(options.out / "gpu.json", result)
        print(row, flush=True)

    print(card)
    for name in SMALL:
        for method_name in METHODS:
            report("agreement", agreement(device, name, method_name))
    checks: dict[str, Callable[[torch.device], str]] = {
        "cuDNN's LSTM": cudnn,
        "torch's LSTM with cuDNN off": without_cudnn,
        "fused attention": fused_attention,
        "fused attention by differences": differences,
        "a compiled module": compiled,
        "dropout and random state": dropout,
        "saved and resumed": partial(resumed, folder=options.out),
    }
    for title, function in checks.items():
        report("checks", check(title, function, device))
    cases = SMALL if options.dry_run else LARGE
    for mode in MODES:
        for name in cases:
            if mode == "compiled" and not name.startswith("transformer"):
                continue  # compiling a loop over time, or 44 layers in two modes, takes minutes
            try:
                with full_precision() if mode == "full float32" else nullcontext():
                    report("cost", cost(device, name, mode, cases, options.repeats))
            except Exception as error:  # one that runs out of memory leaves the others their turn
                report("checks", failed(f"cost of {name}, {mode}", error))
    for experiment in ("augment", "lstm"):
        try:
            with TemporaryDirectory() as folder:
                row = epochs(device, experiment, options.dry_run, options.seconds, Path(folder))
            report("epochs", row)
        except Exception as error:
            report("checks", failed(experiment, error))
    for key in tables:
        print(f"\n{table(result[key])}")
    print(f"\n{card}; written to {options.out}")
    return sum(not row["passed"] for key in ("agreement", "checks") for row in result[key])


if __name__ == "__main__":
    raise SystemExit(main())
