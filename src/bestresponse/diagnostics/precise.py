"""A copy of a problem, where one can be made, whose tensors may be moved; in float64 rounding does not hide faults."""

from ..verification.twin import LARGEST, doubled, is_alike, tensors_of, twin
from .findings import Bench


def copied(bench: Bench, double: bool) -> Bench:
    """The same problem in modules of its own, in float64 if wanted; the bench itself where there is no copy.

    A copy counts where its losses are those of the problem, and reach the same weights and hyperparameters: functions
    that hold modules of their own, or make tensors of a fixed dtype, have none.
    """
    problem = bench.problem
    if sum(x.numel() for x in tensors_of(problem).values()) > LARGEST:
        return bench
    try:
        other, _ = twin((problem, None), double)
        train, val = (doubled(b) if double else b for b in (bench.train, bench.val))
        alike = all(
            is_alike(problem, other, name, batches, bench.seed, double)
            for name, batches in (("train_loss", (bench.train, train)), ("val_loss", (bench.val, val)))
        )
    except Exception:  # a problem that has no such copy, for whatever reason
        return bench
    return Bench(other, train, val, bench.seed, bench.findings) if alike else bench
