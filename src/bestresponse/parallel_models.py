"""Models that are spread over several processes: which group they belong to, and which are refused."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import ALONE, Group
from .errors import ArgumentError, ArgumentTypeError, BestResponseWarning, EvaluationError, named
from .hyperparameters import Weights


def group_of(
    model: nn.Module, hyper: nn.Module, group: object, batch_size: Callable[[Any], float] | None
) -> Group:
    """The group of a problem: the given one, or that of DistributedDataParallel in its modules, or one process alone.

    Raises:
        ArgumentTypeError: ``group`` is not a process group, or ``batch_size`` not a function.
        ArgumentError: the modules belong to several groups.
    """
    if batch_size is not None and not callable(batch_size):
        raise ArgumentTypeError(
            f"Problem.batch_size must be a function (batch) -> number of examples; got {batch_size!r}."
        )
    modules = [*model.modules(), *hyper.modules()]
    refuse_sharded(modules, {**dict(model.named_parameters()), **dict(hyper.named_parameters())})
    held: dict[int, Any] = {id(m.process_group): m.process_group for m in modules if _is_replica(m)}
    if group is not None:
        if not (_is_initialised() and isinstance(group, torch.distributed.ProcessGroup)):
            raise ArgumentTypeError(
                "Problem.group must be a process group of torch.distributed, or None; got "
                f"{type(group).__name__}. Call init_process_group, and pass group=torch.distributed.group.WORLD."
            )
        held[id(group)] = group
    if len(held) > 1:
        raise ArgumentError(
            "all of DistributedDataParallel in a problem, and Problem.group, must be one process group; got "
            f"{len(held)}. Leave group out, or wrap all modules with the same process_group."
        )
    if not held:
        _warn_of_group()
        return ALONE
    sparse = {id(m.table) for m in hyper.modules() if isinstance(m, Weights) and m.sparse}
    device = next((p.device for p in model.parameters()), None)
    return Group(next(iter(held.values())), device, batch_size, sparse)


def inner(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, whose own reductions a problem replaces."""
    while _is_replica(module):
        module = module.module  # type: ignore[assignment]
    return module


@contextmanager
def without_reductions(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let DistributedDataParallel inside a model call its module only, since `Group` takes the means."""
    replicas = [m for m in modules if _is_replica(m)]
    for replica in replicas:
        vars(replica)["forward"] = replica.module
    try:
        yield
    finally:
        for replica in replicas:
            vars(replica).pop("forward", None)


def check_processes(group: Group, modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Raise for modules that cannot be differentiated over the group, and for tensors that differ between ranks."""
    listed = list(modules)
    refuse_sharded(listed, tensors)
    if group.size > 1 and any(isinstance(m, nn.SyncBatchNorm) and m.training for m in listed):
        raise EvaluationError(
            "the losses must not communicate themselves; got SyncBatchNorm in training mode, which has no second "
            "derivative. Use BatchNorm, which normalises by the examples of each rank, or GroupNorm or LayerNorm; or "
            "put SyncBatchNorm into eval mode."
        )
    group.check_equal(tensors)


def refuse_sharded(modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Raise for FSDP and DTensors."""
    why = _sharding(modules) or _sharded(tensors)
    if why:
        raise EvaluationError(
            f"hypergradients need whole weights on each rank; got {why}. torch.autograd.grad does not run the "
            "communication of such models, and would see zeros. Give Problem the plain module, or one in "
            "DistributedDataParallel."
        )


def _is_replica(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _sharding(modules: Iterable[nn.Module]) -> str:
    for module in modules:
        for parent in type(module).__mro__:
            if parent.__module__.startswith("torch.") and parent.__name__ in (
                "FullyShardedDataParallel",
                "FSDPModule",
            ):
                return f"a model in FSDP ({parent.__name__})"
    return ""


def _sharded(tensors: Mapping[str, Tensor]) -> str:
    # Code that makes a DTensor has imported its module.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    if kind is None:
        return ""
    sharded = [name for name, x in tensors.items() if isinstance(x, kind)]
    return f"DTensors, {named(sharded)}" if sharded else ""


def _is_initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _warn_of_group() -> None:
    """Warn if there are other processes that the problem would know nothing of."""
    if _is_initialised() and (size := torch.distributed.get_world_size()) > 1:
        warnings.warn(
            f"the process group has {size} processes, and this problem is computed on its own process alone: "
            "hyperparameters of several ranks drift apart. Pass Problem(..., group=torch.distributed.group.WORLD) for "
            "the mean over the ranks.",
            BestResponseWarning,
            stacklevel=4,
        )
