"""Models that are spread over several processes: which group they belong to, and which are refused."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import _tree
from .distributed import ALONE, Group, is_replica
from .errors import ArgumentError, ArgumentTypeError, BestResponseWarning, EvaluationError, named
from .hyperparameters import Weights
from .sharded import Sharded, refuse_other_shardings


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
    _refuse_fsdp1(modules)
    tuned = {id(p) for p in hyper.parameters()}
    weights = {n: p for n, p in model.named_parameters() if id(p) not in tuned}
    sharded = any(map(_tree.is_sharded, (*weights.values(), *hyper.parameters())))
    held: dict[int, Any] = {id(m.process_group): m.process_group for m in modules if is_replica(m)}
    if sharded:
        refuse_other_shardings(weights, dict(hyper.named_parameters()))
        first: Any = next(iter(weights.values()))
        handle = first.device_mesh.get_group()
        held[id(handle)] = handle
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
    own = {id(m.table) for m in hyper.modules() if isinstance(m, Weights) and m.sharded}
    device = next((p.device for p in model.parameters()), None)
    if sharded:
        _refuse_sizes(batch_size, own)
        return Sharded(next(iter(held.values())), device, hyper.parameters())
    return Group(next(iter(held.values())), device, batch_size, sparse, own)


def inner(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, whose own reductions a problem replaces."""
    while is_replica(module):
        module = module.module  # type: ignore[assignment]
    return module


def check_processes(group: Group, modules: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Raise for modules that cannot be differentiated over the group, and for tensors that differ between ranks."""
    listed: list[Any] = list(modules) if group.size > 1 else []
    for module in listed:
        if group.sharded and callable(getattr(type(module), "reshard", None)):
            module.reshard()  # after a forward pass of its own, FSDP may keep the parameters whole
    if not group.sharded and (late := [n for n, x in tensors.items() if _tree.is_sharded(x)]):
        raise EvaluationError(
            f"fully_shard must come before Problem, which holds the parameters; {named(late)} became DTensors since. "
            "Make the Problem, and the optimisers, after fully_shard."
        )
    if group.size > 1 and any(isinstance(m, nn.SyncBatchNorm) and m.training for m in listed):
        raise EvaluationError(
            "the losses must not communicate themselves; got SyncBatchNorm in training mode, which has no second "
            "derivative. Use BatchNorm, which normalises by the examples of each rank, or GroupNorm or LayerNorm; or "
            "put SyncBatchNorm into eval mode."
        )
    group.check_equal(tensors)


def _refuse_fsdp1(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        names = {k.__name__ for k in type(module).__mro__ if k.__module__.startswith("torch.")}
        if "FullyShardedDataParallel" in names:
            raise EvaluationError(
                "hypergradients need sharded weights as DTensors; got FullyShardedDataParallel, whose flat parameters "
                "torch.autograd.grad does not see. Use torch.distributed.fsdp.fully_shard."
            )


def _refuse_sizes(batch_size: object, own: object) -> None:
    if batch_size is not None or own:
        raise ArgumentError(
            "with sharded weights (fully_shard) the batches of all ranks count equally, and all ranks have the same "
            f"hyperparameters; got {'Weights(sharded=True)' if own else 'batch_size'}. Leave it out, and give each "
            "rank as many examples."
        )


def _is_initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def processes() -> int:
    """The number of processes of torch.distributed's group; one before it is initialised."""
    return torch.distributed.get_world_size() if _is_initialised() else 1


def _warn_of_group() -> None:
    """Warn if the process group has other processes, which the problem leaves out."""
    if (size := processes()) > 1:
        warnings.warn(
            f"the process group has {size} processes, and this problem is computed on its own process alone: "
            "hyperparameters of several ranks drift apart. Pass Problem(..., group=torch.distributed.group.WORLD) for "
            "the mean over the ranks.",
            BestResponseWarning,
            stacklevel=4,
        )
