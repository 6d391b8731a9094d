"""The state of modules besides weights and buffers (frozen parameters, attributes, generators), saved and restored."""

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import _tree
from . import graph, random_state
from .embedding import has_max_norm

# Tensors that are not weights are copied and restored by value, up to so many bytes together.
LARGEST = 2**28
# Larger collections are assumed to be tables that no forward pass changes.
_MOST_ENTRIES = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULES_OWN = frozenset(vars(nn.Module()))


class Watch(Protocol):
    """How to watch for changes of tensors that are not weights.

    Attributes:
        first: whether to look for changes without a new version (through ``.data``) in all tensors.
        silent: identities of tensors that are known to change so; the state adds to them.
        room: the bytes of tensors to copy, to be restored by value; None for `LARGEST`.
    """

    first: bool
    silent: set[int]
    room: int | None


class ModuleState:
    """The state of some modules, without their weights and buffers, at the time when this object was made.

    Parameters are trainable or frozen as before. The attributes of each module are restored as objects. Lists, dicts,
    sets and deques are restored with their entries, generators with their state, and tensors and arrays by value.
    Tensors in the collections and frozen parameters are also restored by value. Deeper state is not restored. Tensors
    that do not fit into ``watch.room`` bytes together are only watched.

    Args:
        modules: the modules whose state to save.
        live: tensors that passes may change: weights and hyperparameters. Tensors that share memory with them are
            left alone.
        watch: how to watch for changes.

    Attributes:
        changed: whether tensors had changed when they were restored.
    """

    def __init__(self, modules: Iterable[nn.Module], live: Mapping[str, Tensor], watch: Watch) -> None:
        scripted = torch.jit.ScriptModule
        plain: list[nn.Module] = []
        compiled: list[nn.Module] = []
        for module in modules:
            (compiled if isinstance(module, scripted) else plain).append(module)
        self._watch, self.changed = watch, False
        self._attributes = {module: _Attributes(module) for module in plain}
        parameters = (p for m in plain for p in m._parameters.values() if p is not None)
        self._requires = [(p, p.requires_grad) for p in (*live.values(), *parameters)]
        # Embeddings with max_norm edit their weights, and buffers of scripted modules can't be swapped.
        changing = [m.weight for m in plain if has_max_norm(m)]
        changing += [b for m in compiled for b in m.buffers(recurse=False)]
        self._changing = {id(x): _Kept(x, copy=True) for x in changing}
        self._others = self._watched(plain, compiled, live)

    def _watched(
        self, plain: list[nn.Module], compiled: list[nn.Module], live: Mapping[str, Tensor]
    ) -> list["_Kept"]:
        """Frozen parameters and tensors in attributes; those with a copy come first."""
        found: dict[int, Tensor] = {}
        for module in plain:
            found.update((id(p), p) for p in module._parameters.values() if p is not None)
            found.update((id(x), x) for x in self._attributes[module].tensors)
        for module in compiled:
            found.update((id(p), p) for p in module.parameters(recurse=False))
        for x in live.values():
            found.pop(id(x), None)
        found = {i: x for i, x in found.items() if i not in self._changing and _holds_values(x)}
        if found:
            of_weights = {x.untyped_storage().data_ptr() for x in live.values()}
            others = [x for x in found.values() if x.untyped_storage().data_ptr() not in of_weights]
        else:
            others = []
        kept, room = [], LARGEST if self._watch.room is None else self._watch.room
        for x in sorted(others, key=lambda x: x.nbytes):
            room -= x.nbytes
            copied = room >= 0 and type(x) in (Tensor, nn.Parameter, nn.Buffer)
            kept.append(_Kept(x, copied, self._watch.first and not copied))
        return kept

    def restore(self) -> None:
        """Restore everything."""
        for attributes in self._attributes.values():
            attributes.restore()
        self.unfreeze()
        for kept in self._changing.values():
            kept.restore()
        for kept in self._others:
            if kept.copy is None:
                continue
            edited = kept.tensor._version != kept.version
            suspected = edited or self._watch.first or id(kept.tensor) in self._watch.silent
            if suspected and kept.restore():
                self.changed = True
                if not edited:
                    self._watch.silent.add(id(kept.tensor))

    def unfreeze(self) -> None:
        """Restore which parameters require gradients."""
        for p, requires in self._requires:
            if p.requires_grad is not requires:
                p.requires_grad_(requires)

    def moved(self) -> list[Tensor]:
        """The tensors without a copy that have changed, and so cannot be restored."""
        return [kept.tensor for kept in self._others if kept.copy is None and kept.changed()]

    def take_over(self, module: nn.Module) -> None:
        """Keep the present attributes of a module instead of the initial ones."""
        if module in self._attributes:
            self._attributes[module] = _Attributes(module)


class _Attributes:
    """The attributes of one module, without its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._own = vars(module)
        self._number = len(self._own)
        self._kept = {name: value for name, value in self._own.items() if name not in _MODULES_OWN}
        self._entries: list[tuple[Any, Any]] = []
        self._generators: dict[str, Any] = {}
        self.tensors: list[Tensor] = []
        numpy = sys.modules.get("numpy")
        for name, value in self._kept.items():
            if type(value) in (int, float, bool, str, tuple, type(None)):
                continue
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif isinstance(value, list | dict | set | deque) and len(value) <= _MOST_ENTRIES:
                self._entries.append((value, _shallow(value)))
                inside = value.values() if isinstance(value, dict) else value
                self.tensors += [x for x in inside if isinstance(x, Tensor)]
                generators = [x for x in inside if isinstance(x, random_state.kinds())]
                self._generators.update({f"{name}.{i}": x for i, x in enumerate(generators)})
            elif isinstance(value, random_state.kinds()):
                self._generators[name] = value
            elif numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes <= LARGEST:
                self._entries.append((value, value.copy()))
        self._states = random_state.states_of(self._generators)

    def restore(self) -> None:
        self._own.update(self._kept)
        if len(self._own) != self._number:
            for name in [n for n in self._own if n not in self._kept and n not in _MODULES_OWN]:
                del self._own[name]
        for value, entries in self._entries:
            _refill(value, entries)
        if self._generators:
            random_state.set_states(self._generators, self._states)


def _shallow(value: Any) -> Any:
    """The entries of a collection, in order."""
    return dict(value) if isinstance(value, dict) else list(value)


def _refill(value: Any, entries: Any) -> None:
    """Restore the entries of a collection."""
    if isinstance(value, list):
        value[:] = entries
    elif isinstance(value, dict):
        if len(value) != len(entries) or any(value.get(k) is not x for k, x in entries.items()):
            value.clear()
            value.update(entries)
    elif isinstance(value, set | deque):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(entries)
    else:  # an array
        value[...] = entries


class _Kept:
    """A tensor with its version, and a copy of its value or the sum of its bits."""

    def __init__(self, tensor: Tensor, copy: bool, summed: bool = False) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.copy = tensor.detach().clone() if copy else None
        self._sum = sum_of_bits(tensor) if summed else None

    def changed(self) -> bool:
        """Whether it was edited; without a copy and a sum, only what its version shows."""
        edited = bool(self.tensor._version != self.version)
        return edited or (self._sum is not None and sum_of_bits(self.tensor) != self._sum)

    @torch.no_grad()
    def restore(self) -> bool:
        """Restore the value; return whether it had changed."""
        assert self.copy is not None
        moved = not same_bits(self.tensor, self.copy)
        if moved:
            put_back(self.tensor, self.copy)
        self.version = self.tensor._version
        return moved


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal in every bit, a NaN in both included."""
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    integers = _INTEGERS.get(x.itemsize)
    x, y = _tree.part_of(x.detach()), _tree.part_of(y.detach())
    return torch.equal(x, y) if integers is None else torch.equal(x.view(integers), y.view(integers))


def sum_of_bits(x: Tensor) -> int | None:
    """A number that changes if any one entry changes; None if the layout has no such view."""
    x, integers = _tree.part_of(x), _INTEGERS.get(x.itemsize)
    if integers is None or type(x) not in (Tensor, nn.Parameter, nn.Buffer):
        return None
    return int(x.detach().view(integers).sum(dtype=torch.int64))


@torch.no_grad()
def put_back(tensor: Tensor, kept: Tensor) -> None:
    """Copy the kept value into a tensor, even if its storage was replaced."""
    if tensor.shape == kept.shape and tensor.dtype == kept.dtype and tensor.device == kept.device:
        tensor.copy_(kept)
    else:
        tensor.data = kept.clone()


def _holds_values(x: Tensor) -> bool:
    """Whether user code can have changed a tensor: a plain leaf with its own memory."""
    return (
        graph.made_by(x) is None
        and x.layout == torch.strided
        and x.device.type != "meta"
        and not x.is_quantized
        and not x.is_inference()
        and not isinstance(x, nn.UninitializedParameter | nn.UninitializedBuffer)
    )


def places_of(root: nn.Module, tensors: Iterable[Tensor]) -> list[str]:
    """Where tensors are among the parameters and attributes of modules, for messages."""
    wanted = {id(x) for x in tensors}
    return [
        f"{path}.{name}"
        for path, module in root.named_modules()
        for name, x in (*module._parameters.items(), *vars(module).items())
        if id(x) in wanted
    ]
