"""Every solver on every curvature: how near is the hypergradient to the exact one, after how many products?

A network 64-16-10 with tanh on scikit-learn's digits (pixels from 0 to 1), 400 training and 400 validation examples, a
weight decay of 1e-3 for each of its 1,210 weights, in float64. The weights are trained to a stationary point by L-BFGS,
or stopped short of one (--unfinished): there the Hessian is indefinite. The exact hypergradient is that of the dense
Hessian (damped by twice its most negative eigenvalue where there is one).

    python benchmarks/grid.py --threads 1

prints two tables of cosines at 20 products, and writes grid.json and grid.png into --out.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bestresponse as br
from bestresponse import _tree
from bestresponse._layout import table
from bestresponse.experiments import plots
from bestresponse.experiments.classification import Batch, train_loss, val_loss
from bestresponse.experiments.runs import versions, write_whole

STEPS = (1, 2, 3, 5, 10, 20, 50)
TOLD = 20
SOLVERS: dict[str, Callable[[int, Any], br.Solver]] = {
    "Neumann(K)": lambda k, _: br.Neumann(k),
    "ConjugateGradient(K)": lambda k, _: br.ConjugateGradient(k, tolerance=0.0),
    "… damping=None": lambda k, _: br.ConjugateGradient(k, tolerance=0.0, damping=None),
    "… preconditioner=KFAC(...)": lambda k, kfac: br.ConjugateGradient(k, tolerance=0.0, preconditioner=kfac),
    "MINRES(K)": lambda k, _: br.MINRES(k, tolerance=0.0),
    "solvers.GMRES(K)": lambda k, _: br.solvers.GMRES(k, tolerance=0.0),
    "Nystrom(K, 0.1)": lambda k, _: br.Nystrom(k, damping=0.1),
    "solvers.SOBA(K)": lambda k, _: br.solvers.SOBA(k),
    "Identity()": lambda k, _: br.Identity(),
    "Exact()": lambda k, _: br.Exact(),
}


FIXED = ("Identity()", "Exact()")
SHOWN = tuple(name for name in SOLVERS if name not in (*FIXED, "solvers.GMRES(K)", "solvers.SOBA(K)"))


def predict(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch[0])
    return outputs


def example_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def curvatures(decay: nn.Module) -> dict[str, br.Curvature]:
    loss = br.losses.CrossEntropy(lambda batch: batch[1])
    return {
        "Hessian": br.Hessian(),
        "GaussNewton": br.GaussNewton(predict, loss, decay),
        "KFAC": br.KFAC(predict, loss, decay),
        "EmpiricalFisher": br.EmpiricalFisher(example_loss, decay),
        "FiniteDifference": br.FiniteDifference(),
    }


def trained(finished: bool, seed: int) -> tuple[br.Problem, Batch, Batch]:
    """The network at a stationary point, or after a few steps of L-BFGS."""
    torch.manual_seed(seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x, y = torch.tensor(digits.data / 16.0), torch.tensor(digits.target)
    train, val = ((x[rows], y[rows]) for rows in (order[:400], order[400:800]))
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    problem = br.Problem(model, br.hyperparameters.WeightDecay(model, initial=1e-3), train_loss, val_loss)
    weights = list(problem.weights.values())
    optimizer = torch.optim.LBFGS(
        weights, max_iter=5000 if finished else 30, tolerance_grad=1e-10, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.train_loss(model, problem.hyper, train)
        loss.backward(inputs=weights)
        return loss

    optimizer.step(closure)
    return problem, train, val


def measure(finished: bool, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The problem in numbers, and a row for each solver, curvature and number of products."""
    problem, train, val = trained(finished, seed)
    spectrum = br.hypergradient(problem, train, val, br.Implicit(br.Exact())).solve.curvature  # type: ignore[union-attr]
    assert spectrum is not None
    damping = max(0.0, -2.0 * spectrum[0])
    exact = _tree.flatten(br.hypergradient(problem, train, val, br.Implicit(br.Exact(damping))).total)
    loss = problem.train_loss(problem.model, problem.hyper, train)
    of_train = torch.autograd.grad(loss, list(problem.weights.values()))
    known = {
        "finished": finished,
        "lowest": spectrum[0],
        "highest": spectrum[1],
        "gradient": float(torch.cat([g.reshape(-1) for g in of_train]).norm()),
    }
    kfac = curvatures(problem.hyper)["KFAC"]
    rows = []
    for curvature_name, curvature in curvatures(problem.hyper).items():
        for solver_name, make in SOLVERS.items():
            for steps in (0,) if solver_name in FIXED else STEPS:
                h = br.hypergradient(problem, train, val, br.Implicit(make(steps, kfac), curvature))
                found = _tree.flatten(h.total)
                assert h.solve is not None
                rows.append(
                    {
                        "solver": solver_name,
                        "curvature": curvature_name,
                        "steps": steps,
                        "products": h.solve.products,
                        "status": str(h.solve.status),
                        "cosine": float(torch.dot(found, exact) / found.norm() / exact.norm()),
                        "size": float(found.norm() / exact.norm()),
                    }
                )
    return known, rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cosines by solver and curvature, at `TOLD` steps where there are steps."""
    told = [r for r in rows if r["steps"] in (TOLD, 0)]
    names = dict.fromkeys(r["curvature"] for r in rows)
    return [
        {
            "solver": solver,
            **{
                c: next(r["cosine"] for r in told if (r["solver"], r["curvature"]) == (solver, c))
                for c in names
            },
        }
        for solver in SOLVERS
    ]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    colours = (plots.GREY, plots.BLUE, plots.GREEN, plots.ORANGE, plots.PURPLE, plots.RED)
    with plots.panels(path, 1, 2, (11.0, 4.0), sharey=True) as axes:
        for axis, (run, curvature) in zip(
            axes[0], ((runs[0], "Hessian"), (runs[1], "GaussNewton")), strict=True
        ):
            for colour, solver in zip(colours, SHOWN, strict=True):
                at = [r for r in run["rows"] if (r["solver"], r["curvature"]) == (solver, curvature)]
                axis.plot(
                    [r["steps"] for r in at],
                    [1.0 - r["cosine"] for r in at],
                    "o-",
                    color=colour,
                    ms=3,
                    label=solver,
                )
            where = "at a stationary point" if run["finished"] else "short of one"
            plots.style(axis, "steps K", "1 − cosine to the exact hypergradient", f"{curvature}, {where}")
            axis.set_xscale("log")
            axis.set_yscale("log")
        axes[0][0].legend(frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/grid"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    options.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for finished in (True, False):
        known, rows = measure(finished, options.seed)
        runs.append({**known, "rows": rows})
        where = "at a stationary point" if finished else "short of one"
        print(
            f"{where}: eigenvalues from {known['lowest']:.3g} to {known['highest']:.3g}, "
            f"‖∂L_T/∂w‖ = {known['gradient']:.2g}; cosines at {TOLD} steps"
        )
        print(table(summary(rows)))
    write_whole(options.out / "grid.json", {"runs": runs, "versions": versions()})
    draw(runs, options.out / "grid.png")


if __name__ == "__main__":
    main()
