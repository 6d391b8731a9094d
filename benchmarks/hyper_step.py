"""What a whole hyper-step of a transformer costs, in weight steps: CPU time, products and peak memory.

    python benchmarks/hyper_step.py --threads 1

Networks whose sources of data have a weight each, trained for a few steps by Adam: GPTs, with and without
checkpoints around their blocks, and adapters (LoRA) of a frozen Llama in bfloat16 with random weights, which needs
``pip install transformers peft``. "In pieces": the hyper-step's batches are `Batches` of three or four pieces, one of
whose graphs is held at a time. Weight steps and hypergradients take turns in a process of their own for each row;
times and products are medians of the calls after the first, which verifies. `Implicit()` is measured once it has gone
over to Gauss-Newton; "before" has how many calls that took, and the longest of them but the first. A method that
refuses a network is listed with its error. A weight step is a training gradient and Adam's step. Memory is the peak of
another process above its memory with the network and all libraries loaded, where freed memory returns to the system
(MALLOC_MMAP_THRESHOLD_).

prints one table, and writes hyper_step.json into --out.

    python benchmarks/hyper_step.py --threads 1 --parts "wide GPT, 8 × 128 tokens"

prints what the parts of a hyper-step on one network take, in training gradients.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformer import GPT, WORDS, Size, Work, measured, medians, named, resident, void

import bestresponse as br
from bestresponse._layout import table
from bestresponse.curvatures.several_batches import linear_system
from bestresponse.experiments.runs import versions, write_whole


class Checkpointed(GPT):
    """A GPT with a checkpoint around each block."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.blocks = Steps(*self.blocks)


class Steps(nn.Sequential):
    """Blocks, each behind a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Adapters(nn.Module):
    """The logits of a frozen Llama in bfloat16, with adapters in float32."""

    checkpoints = False

    def __init__(self, size: Size) -> None:
        super().__init__()
        import peft
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=size.width,
            intermediate_size=3 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.width // 32,
            max_position_embeddings=size.tokens,
        )
        base = LlamaForCausalLM(settings).to(torch.bfloat16)
        where = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        self.inner = peft.get_peft_model(base, where)
        if self.checkpoints:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=words).logits
        return logits.float()


class CheckpointedAdapters(Adapters):
    """The same, with Hugging Face's checkpoints."""

    checkpoints = True


class Network(NamedTuple):
    """A network, the size of it and its batch, and the pieces of the hyper-step's batches."""

    make: Callable[[Size], nn.Module]
    size: Size
    pieces: int = 1


LONG = Size(256, 8, 128, 8)
LORA = Size(128, 8, 256, 4)
NETWORKS = {
    "GPT, 8 × 128 tokens": Network(GPT, Size(128, 8, 128, 4)),
    "wide GPT, 8 × 128 tokens": Network(GPT, Size(128, 8, 384, 4)),
    "GPT, 8 × 256 tokens": Network(GPT, LONG),
    "GPT, 8 × 256 tokens, checkpoints": Network(Checkpointed, LONG),
    "GPT, 8 × 256 tokens, checkpoints, in pieces": Network(Checkpointed, LONG, 4),
    "adapters, 8 × 128 tokens": Network(Adapters, LORA),
    "adapters, 8 × 128 tokens, in pieces": Network(Adapters, LORA, 3),
    "adapters, 8 × 128 tokens, checkpoints": Network(CheckpointedAdapters, LORA),
    "adapters, 8 × 128 tokens, checkpoints, in pieces": Network(CheckpointedAdapters, LORA, 4),
}
OWN = "Implicit()"
METHODS: dict[str, Callable[["Training"], br.Method]] = {
    OWN: lambda _: br.Implicit(),
    "GaussNewton, 4 steps": lambda t: t.conjugate(4, br.GaussNewton()),
    "GaussNewton, 2 steps": lambda t: t.conjugate(2, br.GaussNewton()),
    "conjugate gradient, 4 steps": lambda t: t.conjugate(4, br.Hessian()),
    "conjugate gradient, 1 step": lambda t: t.conjugate(1, br.Hessian()),
    "T1 - T2": lambda _: br.Implicit(br.Identity()),
    "SAMA": lambda _: br.SAMA(),
}


class Training(Work):
    """The problem, some steps after the beginning."""

    def __init__(self, network: Network, verify: bool) -> None:
        super().__init__(network.size, network.make, verify)
        self.pieces = network.pieces
        self.optimizer = torch.optim.Adam(self.problem.weights.values(), 1e-3)

    def step(self) -> None:
        """A weight step."""
        self.optimizer.zero_grad()
        loss = self.train_loss(self.model, self.hyper, self.train)
        loss.backward(inputs=list(self.problem.weights.values()))
        self.optimizer.step()

    def hypergradients(self, what: str) -> Callable[[], br.Hypergradient | None]:
        """Calls of the method with this name, or of nothing."""
        if what not in METHODS:
            return lambda: None
        train, val = self.divided(self.train), self.divided(self.val)
        given = self.problem, train, val, METHODS[what](self)
        return lambda: br.hypergradient(*given, weight_optimizer=self.optimizer)

    def divided(self, batch: Tensor) -> Any:
        """The batch, or its pieces."""
        pieces = batch.chunk(self.pieces)
        return (
            batch if self.pieces == 1 else br.Batches(pieces, weights=list(map(len, pieces)), recompute=True)
        )

    def conjugate(self, steps: int, curvature: br.curvatures.Curvature) -> br.Method:
        """Conjugate gradient of exactly so many steps, and the product of a warm start."""
        return br.Implicit(br.ConjugateGradient(steps, 0.0, damping=1.0), curvature, warm_start=True)


def went_over(training: Training, call: Callable[[], br.Hypergradient | None]) -> list[float]:
    """The times of the calls until one has gone over to Gauss-Newton, at most forty."""
    took = []
    for _ in range(40):
        start = time.process_time()
        found = call()
        took.append(time.process_time() - start)
        training.step()
        if found is not None and found.solve is not None and "Gauss-Newton, since" in found.solve.detail:
            break
    return took


def row(network: str, what: str, repeats: int, verify: bool) -> dict[str, float]:
    """The measurements of one process."""
    given = NETWORKS[network]
    small = Training(given._replace(size=Size(4, given.pieces, 32, 1)), verify)
    small.step()
    small.hypergradients(what)()  # which loads the libraries
    training = Training(given, verify)
    base = resident()
    for _ in range(5):
        training.step()
    call = training.hypergradients(what)
    times: dict[str, list[float]] = {"weight step": [], what: []}
    products = []
    before = went_over(training, call) if what == OWN else [0.0]
    for number in range(repeats + 1):
        for name, run in (("weight step", training.step), (what, call)):
            start = time.process_time()
            found = run()
            if number:
                times[name].append(time.process_time() - start)
        if number and found is not None and found.solve is not None:
            products.append(found.solve.products)
    step = statistics.median(times["weight step"])
    return {
        "time": statistics.median(times[what]) / step,
        "calls before": len(before),
        "longest before": max(before[1:], default=0.0) / step,
        "seconds": step,
        "products": statistics.median(products) if products else 0.0,
        "memory": resident() - base,
        "weights": sum(w.numel() for w in training.problem.weights.values()),
    }


def parts(network: Network, curvature: str, repeats: int) -> dict[str, float]:
    """The times of the parts of a hyper-step, in training gradients."""
    training = Training(network, verify=False)
    for _ in range(5):
        training.step()
    steps = medians({"gradient": training.gradient, "a weight step": training.step}, repeats)
    problem, kind, train, val = training.problem, named(curvature), training.train, training.val
    weights = list(problem.weights.values())
    with problem.undisturbed(None) as passes:
        system = linear_system(kind, passes, train)
        v = {n: torch.randn_like(problem.weights[n]) for n in system.names}
        times = medians(
            {
                "gradient": training.gradient,
                "validation gradient": lambda: void(torch.autograd.grad(passes.val_loss(val), weights)),
                "the graph of the training gradient": lambda: void(linear_system(kind, passes, train)),
                "a product": lambda: void(system(v)),
                "a product with the mixed term of its vector": lambda: void(system.with_mixed(v)),
                "the mixed term alone": lambda: void(system.mixed(v, False)),
            },
            repeats,
        )
    unit = times.pop("gradient")
    own = {"a weight step": steps["a weight step"] / steps["gradient"]}
    return own | {name: t / unit for name, t in times.items()}


def lines(rows: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, str]]:
    """The rows of the table, without what was refused."""
    return [
        {
            "network": name,
            "weights": f"{r['weights'] / 1e6:.2g} M",
            "weight step": f"{found['weight step']['memory']:.0f} MiB",
            "method": what,
            "products": f"{r['products']:.2g}",
            "weight steps": f"{r['time']:.1f}",
            "before": f"{r['calls before']}, {r['longest before']:.1f}" if what == OWN else "",
            "memory": f"{r['memory']:.0f} MiB",
            "ratio": f"{r['memory'] / found['weight step']['memory']:.1f}",
        }
        for name, found in rows.items()
        for what, r in found.items()
        if what != "weight step" and "refused" not in r
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--no-verify", action="store_true", help="leave out the verification of the first call"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/hyper_step"))
    parser.add_argument("--parts", choices=NETWORKS, help="the parts of a hyper-step on this network only")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.row:
        try:
            print(json.dumps(row(*options.row, options.repeats, not options.no_verify)))
        except br.Error as error:
            print(json.dumps({"memory": 0.0, "refused": f"{type(error).__name__}: {error}"}))
        return
    if options.parts:
        kinds = ("Hessian", "GaussNewton")
        columns = {kind: parts(NETWORKS[options.parts], kind, 2 * options.repeats) for kind in kinds}
        print(f"torch {torch.__version__}, {options.threads} thread(s); times in training gradients")
        print(table([{"part": p, **{k: f"{columns[k][p]:.2f}" for k in kinds}} for p in columns["Hessian"]]))
        return
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for network in options.networks:
        for what in ["weight step", *options.methods]:
            wanted = [network, what, *(["--no-verify"] if options.no_verify else [])]
            found = measured(__file__, wanted, options.repeats, options.threads)
            rows.setdefault(network, {})[what] = found
            refused = found.get("refused")
            cost = refused or f"{found['time']:.2f} weight steps, {found['memory']:.0f} MiB"
            print(network, what, cost, flush=True)
    print(f"torch {torch.__version__}, {options.threads} thread(s); times in weight steps")
    print(table(lines(rows)))
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"rows": rows, "threads": options.threads, "repeats": options.repeats, "versions": versions()}
    write_whole(options.out / "hyper_step.json", record)


if __name__ == "__main__":
    main()
