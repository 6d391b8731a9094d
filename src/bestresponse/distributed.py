"""Only one process is supported: groups of processes and models distributed over them are refused."""

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .errors import EvaluationError, named

_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP (fully_shard)",
}


def refuse_several_processes(modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Raise for a model wrapped for several processes, for DTensors, and within a group of processes."""
    why = _wrapped(modules) or _sharded(tensors) or _grouped()
    if why:
        raise EvaluationError(
            f"hypergradients need one process that holds the whole model; got {why}. Each process would compute its "
            "own number, or zeros, since torch.autograd.grad does not run the communication of such models. "
            "Give Problem the plain module in a single process; or tune on one rank that has made no process group, "
            "and train with the tuned hyperparameters on all of them."
        )


def _wrapped(modules: Iterable[nn.Module]) -> str:
    for module in modules:
        for parent in type(module).__mro__:
            if parent.__module__.startswith("torch.") and parent.__name__ in _WRAPPERS:
                return f"a model in {_WRAPPERS[parent.__name__]}"
    return ""


def _sharded(tensors: Mapping[str, Tensor]) -> str:
    # Code that makes a DTensor has imported its module.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    if kind is None:
        return ""
    sharded = [name for name, x in tensors.items() if isinstance(x, kind)]
    return f"DTensors, {named(sharded)}" if sharded else ""


def _grouped() -> str:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    size = distributed.get_world_size()
    return f"an initialised process group of {size} processes" if size > 1 else ""
