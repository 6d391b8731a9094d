"""The same hypergradient by other libraries: time and memory of a product, of what comes without any, and agreement.

    pip install betty-ml torchopt hypergrad higher curvlinops-for-pytorch
    python benchmarks/peers.py --threads 1

A weight decay for each weight of the networks of `cost.py` and of a GPT of `transformer.py`; K products of a Neumann
series of one fixed scale, on one batch. Each library runs in a process of its own. The processes take turns, call by
call, and CPU time is counted, so that what else a machine does falls on all of them. The unit is a training gradient in
the same process. Each answer is compared with ours in float64. What fails is listed with its error. A library that is
not installed is left out.

`higher` has no implicit method: it unrolls K + 1 steps of gradient descent, and is compared with
`Unrolled(K + 1, scale)`. `curvlinops` gives products with the Hessian of a loss of (model, data), and knows no
hyperparameters: the regulariser, the series and the mixed term around it are written by hand. The rows of torch are a
series by hand, with products by double backward, and by torch.func's jvp of the gradient. Other libraries run attention
by its math backend, since torch's fused kernel has no second derivative; the unit is a gradient by the fused kernel.
Operations are those that torch's FlopCounterMode counts.

prints one table for each network, and writes peers.json and peers.png into --out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import cost
import libraries
import torch
import torch.nn.functional as F
import transformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bestresponse as br
from bestresponse._layout import table
from bestresponse.diagnostics import measuring
from bestresponse.experiments import plots
from bestresponse.experiments.classification import predict, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

SCALE = 1e-3
FEW, MANY = 1, 10
Tensors = libraries.Tensors
# Maps K to the hypergradient.
Call = Callable[[int], Tensors]


class GPT(transformer.GPT):
    """A GPT with a row of logits for each place."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words).flatten(0, 1)


def gpt() -> tuple[nn.Module, Tensor]:
    size = transformer.NETWORKS["8 × 128 tokens"]
    return GPT(size), torch.randint(transformer.WORDS, (size.sequences, size.tokens))


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {**cost.CASES, "GPT": gpt}


class Setting:
    """One network with its batch, and the losses as functions of lists of weights and hyperparameters."""

    def __init__(self, case: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        model, x = CASES[case]()
        self.model = model.to(dtype)
        self.x = x.to(dtype) if x.is_floating_point() else x
        classes, count = (10, len(x)) if x.is_floating_point() else (1000, x.numel())
        self.y = torch.randint(classes, (count,))
        self.names = [n for n, _ in model.named_parameters()]
        self.weights = list(model.parameters())
        self.rates = [nn.Parameter(torch.full_like(w, -8.0)) for w in self.weights]

    def val(self, weights: Tensors) -> Tensor:
        """The cross-entropy at these weights."""
        named = dict(zip(self.names, weights, strict=True))
        outputs = torch.func.functional_call(self.model, named, (self.x,))
        return F.cross_entropy(outputs, self.y)

    def train(self, weights: Tensors, rates: Tensors) -> Tensor:
        """The training loss, its regulariser in plain operations."""
        penalty = (
            torch.stack([(r.exp() * w.square()).sum() for w, r in zip(weights, rates, strict=True)]).sum() / 2
        )
        return self.val(weights) + penalty

    def gradient(self) -> None:
        """One plain training gradient."""
        torch.autograd.grad(self.train(self.weights, self.rates), self.weights)


def ours(setting: Setting, make: Callable[[int, nn.Module], br.Method]) -> Call:
    decay = br.hyperparameters.WeightDecay(setting.model, initial=float(torch.tensor(-8.0).exp()))
    problem = br.Problem(setting.model, decay, train_loss, val_loss, val_mode="as_is")
    batch = (setting.x, setting.y)
    # A problem verifies a curvature once, at its first call.
    method = cache(lambda k: make(k, decay))
    return lambda k: list(br.hypergradient(problem, batch, batch, method(k)).total.values())


def hessian(setting: Setting) -> Call:
    return ours(setting, lambda k, _: br.Implicit(br.Neumann(k, SCALE), estimate_error=False))


def gauss_newton(setting: Setting) -> Call:
    loss = br.losses.CrossEntropy(lambda batch: batch[1])
    return ours(
        setting,
        lambda k, decay: br.Implicit(
            br.Neumann(k, SCALE), br.GaussNewton(predict, loss, decay), estimate_error=False
        ),
    )


def unrolled(setting: Setting) -> Call:
    return ours(setting, lambda k, _: br.Unrolled(k + 1, SCALE))


def curvlinops(setting: Setting) -> Call:
    from curvlinops import HessianLinearOperator

    def call(k: int) -> Tensors:
        data = [(setting.x, setting.y)]
        operator = HessianLinearOperator(
            setting.model, nn.CrossEntropyLoss(), setting.weights, data, check_deterministic=False
        )
        term = list(torch.autograd.grad(setting.val(setting.weights), setting.weights))
        total = [t.clone() for t in term]
        for _ in range(k):
            product = operator @ [t.detach() for t in term]
            with torch.no_grad():
                for t, s, p, r in zip(term, total, product, setting.rates, strict=True):
                    t -= SCALE * (p + r.exp() * t)
                    s += t
        with torch.no_grad():
            return [
                -SCALE * s * r.exp() * w
                for s, r, w in zip(total, setting.rates, setting.weights, strict=True)
            ]

    return call


def higher(setting: Setting) -> Call:
    import higher as library

    optimizer = torch.optim.SGD(setting.model.parameters(), SCALE)

    def call(k: int) -> Tensors:
        with library.innerloop_ctx(setting.model, optimizer) as (model, steps):
            for _ in range(k + 1):
                weights = list(model.parameters())
                penalty = torch.stack(
                    [(r.exp() * w.square()).sum() for w, r in zip(weights, setting.rates, strict=True)]
                ).sum()
                steps.step(F.cross_entropy(model(setting.x), setting.y) + penalty / 2)
            return torch.autograd.grad(F.cross_entropy(model(setting.x), setting.y), setting.rates)

    return call


def by_torch(function: Callable[[Any, int, float], Tensors]) -> Callable[[Setting], Call]:
    return lambda setting: lambda k: function(setting, k, SCALE)


def operations(call: Call, setting: Setting) -> float:
    """The floating-point operations of a product, in those of a training gradient."""
    call(FEW + 1)  # the first call verifies
    one, two = (transformer.count(lambda k=k: transformer.void(call(k))) for k in (FEW, FEW + 1))
    return (two - one) / transformer.count(setting.gradient)


LIBRARIES: dict[str, tuple[Callable[[Setting], Call], str | None]] = {
    "bestresponse, Hessian": (hessian, None),
    "bestresponse, GaussNewton": (gauss_newton, None),
    "betty": (lambda setting: lambda k: libraries.betty(setting, "neumann", k, SCALE), "betty"),
    "torchopt": (lambda setting: lambda k: libraries.torchopt(setting, k, SCALE), "torchopt"),
    "hypergrad": (lambda setting: lambda k: libraries.hypergrad(setting, k, SCALE), "hypergrad"),
    "curvlinops, by hand": (curvlinops, "curvlinops"),
    "torch, double backward": (by_torch(libraries.double_backward), "torch"),
    "torch.func, jvp": (by_torch(libraries.jvp_of_gradient), "torch"),
    "bestresponse, Unrolled": (unrolled, None),
    "higher, unrolled": (higher, "higher"),
}
COMPARED = {
    "bestresponse, GaussNewton": gauss_newton,
    "bestresponse, Unrolled": unrolled,
    "higher, unrolled": unrolled,
}


def in_math(call: Call) -> Call:
    """The call with attention by its math backend."""

    def run(k: int) -> Tensors:
        with sdpa_kernel(SDPBackend.MATH):
            return call(k)

    return run


def work(library: str, case: str, threads: int) -> None:
    """One library in a process of its own, told on its standard input what to time, and when."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    setting = Setting(case)
    try:
        make, module = LIBRARIES[library]
        call = make(setting) if module is None else in_math(make(setting))
        answer = call(FEW)
        exact = COMPARED.get(library, hessian)(Setting(case, torch.float64))(FEW)
        far, size = (
            torch.cat([part.double().reshape(-1) for part in parts]).norm()
            for parts in ([a.double() - e for a, e in zip(answer, exact, strict=True)], exact)
        )
        told: dict[str, Any] = {"apart": float(far / size)}
        unit = measuring.peak_bytes(setting.gradient)
        for k in (0, FEW, MANY):
            call(k)  # the first call of a method verifies
            told[f"memory {k}"] = measuring.peak_bytes(partial(call, k)) / unit
        told["by count"] = operations(call, setting)
    except Exception as error:  # what a library raises is the result
        said = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"error": said[:90]}), flush=True)
        return
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        task = line.strip()
        setting.gradient()  # the system may have reclaimed the memory of a process that waited for its turn
        start = time.process_time()
        if task == "gradient":
            setting.gradient()
        else:
            call(int(task))
        print(json.dumps(time.process_time() - start), flush=True)


def measure(case: str, threads: int, repeats: int) -> list[dict[str, Any]]:
    """Start a process for each library, and let them take turns."""
    rows, processes = {}, {}
    for library, (_, module) in LIBRARIES.items():
        if module is not None and find_spec(module) is None:
            print(f"{library} is not installed, and left out")
            continue
        command = [sys.executable, __file__, "--worker", library, "--case", case, "--threads", str(threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        lines = [line for line in [process.stdout.readline()] if line.strip()]
        told = json.loads(lines[0]) if lines else {"error": "the process ended without a word"}
        rows[library] = {"case": case, "library": library, **told}
        if "error" not in told:
            processes[library] = process
    tasks = ["gradient", "0", str(FEW), str(MANY)]
    taken: dict[tuple[str, str], list[float]] = {(name, task): [] for name in processes for task in tasks}
    for number in range(repeats + 1):
        for task in tasks:
            for library, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(task + "\n")
                process.stdin.flush()
                seconds = float(json.loads(process.stdout.readline()))
                if number:
                    taken[library, task].append(seconds)
    for library, process in processes.items():
        process.communicate()
        median = {task: statistics.median(taken[library, task]) for task in tasks}
        unit = median["gradient"]
        rows[library] |= {
            "fixed": median["0"] / unit,
            "a product": (median[str(MANY)] - median[str(FEW)]) / (MANY - FEW) / unit,
            f"K = {MANY}": median[str(MANY)] / unit,
            "gradient [ms]": 1e3 * unit,
        }
    return list(rows.values())


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = (
        "library",
        "fixed",
        "a product",
        "by count",
        f"K = {MANY}",
        f"memory {FEW}",
        f"memory {MANY}",
        "apart",
        "error",
    )
    return [{k: r.get(k, "") for k in keys if k != "error" or any("error" in r for r in rows)} for r in rows]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    cases = list(dict.fromkeys(r["case"] for r in rows))
    colours = plots.GREY, plots.GREEN, plots.ORANGE, plots.PURPLE, plots.RED
    others, markers = ((colour, mark) for mark in "Dv" for colour in colours), iter("os^")
    looks = {  # ours blue, by shape; the others by colour and shape
        name: (plots.BLUE, next(markers)) if module is None else next(others)
        for name, (_, module) in LIBRARIES.items()
    }
    with plots.panels(path, 1, len(cases), (2.9 * len(cases) + 2.2, 3.2)) as axes:
        for axis, case in zip(axes[0], cases, strict=True):
            for row in (r for r in rows if r["case"] == case and "error" not in r):
                colour, marker = looks[row["library"]]
                label = row["library"] if case == cases[0] else None
                axis.plot(row["a product"], row[f"memory {MANY}"], marker, color=colour, ms=6, label=label)
            plots.style(axis, "time of a product", f"memory at K = {MANY}", case)
            axis.set_xlim(0.0, 1.15 * max(r.get("a product", 0.0) for r in rows))
            axis.set_ylim(0.0, 1.08 * max(r.get(f"memory {MANY}", 0.0) for r in rows))
        axes[0][0].figure.legend(loc="outside right center", frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="processor threads for torch, in each process")
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds; the median is reported")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder to write to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.case, options.threads)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in options.cases:
        rows += (of_case := measure(case, options.threads, options.repeats))
        print(f"{case}: in training gradients")
        print(table(shown(of_case)), flush=True)
    result = {"rows": rows, "threads": options.threads, "repeats": options.repeats, "versions": versions()}
    write_whole(options.out / "peers.json", result)
    draw(rows, options.out / "peers.png")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
