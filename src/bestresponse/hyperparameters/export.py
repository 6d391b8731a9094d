"""Hyperparameters as files that other programs read."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._files import as_path, replace_text, replacing
from ..errors import ArgumentError, ArgumentTypeError, FileError, require_package
from .protocol import Constrained

_FORMAT = "bestresponse hyperparameters, 1"
_STORED, _VALUES = "stored.", "values."
_SHOWN = 1_000  # entries of a tensor that are written as text


def save(hyper: nn.Module, path: str | Path) -> Path:
    """Write hyperparameters for use without this library: a safetensors file, and beside it a text to read.

    The file has the tensors of ``hyper`` as they are stored (``stored.NAME``), for `load`; and the values as they are
    used (``values.NAME``): of a `Constrained` module those of its ``values()``, such as the decays exp(λ) by the
    name of the weight, and otherwise the parameters. The text at ``path.json`` has the values too, of a tensor with
    more than a thousand entries its shape, minimum, mean and maximum.

    Args:
        hyper: the module.
        path: the file, such as "decay.safetensors"; an old one is replaced.

    Returns:
        The path of the text.

    Raises:
        MissingPackageError: safetensors is not installed.
        FileError: a file cannot be written.
    """
    path = as_path("hyperparameters.save's path", path)
    require_package("safetensors", "hyperparameters.save", "export")
    from safetensors.torch import save as as_bytes

    values = _values(_checked("save", hyper))
    tensors = {_STORED + n: x for n, x in _stored(hyper).items()} | {
        _VALUES + n: x for n, x in values.items()
    }
    copies = {n: x.detach().cpu().contiguous().clone() for n, x in tensors.items()}
    about = {"format": _FORMAT, "sha256": _digest(copies)}
    with replacing(path, "hyperparameters.save") as file:
        file.write(as_bytes(copies, about))
    text = {"format": _FORMAT, "file": path.name, "values": {n: _readable(n, x) for n, x in values.items()}}
    place = path.with_name(f"{path.name}.json")
    replace_text(place, json.dumps(text, indent=2, ensure_ascii=False) + "\n", "hyperparameters.save")
    return place


@torch.no_grad()
def load(hyper: nn.Module, path: str | Path) -> None:
    """Restore hyperparameters that `save` wrote, in place, in a module of the same kind.

    Args:
        hyper: the module.
        path: the safetensors file.

    Raises:
        MissingPackageError: safetensors is not installed.
        FileError: the file is missing, damaged, or something else.
        ArgumentError: the module has other tensors; then nothing has changed.
    """
    path = as_path("hyperparameters.load's path", path)
    require_package("safetensors", "hyperparameters.load", "export")
    stored, present = _read(path), _stored(_checked("load", hyper))
    differing = sorted(
        n for n in stored.keys() | present.keys() if _layout_of(stored, n) != _layout_of(present, n)
    )
    if differing:
        raise ArgumentError(
            f"hyperparameters.load needs a module with the saved tensors; it differs in {differing[:5]}. Make it in "
            "the same way."
        )
    for name, x in present.items():
        x.copy_(stored[name])


def _read(path: Path) -> dict[str, Tensor]:
    """The stored tensors of a file whose checksum is right."""
    from safetensors import safe_open

    advice = f"hyperparameters.load needs a file written by hyperparameters.save; got {str(path)!r}"
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own errors, and those of the system
        raise FileError(f"{advice}, which cannot be read: {str(error) or type(error).__name__}.") from error
    if about.get("format") != _FORMAT:
        raise FileError(f"{advice}, which is something else.")
    if about.get("sha256") != _digest(tensors):
        raise FileError(f"{advice}, which is damaged.")
    return {n.removeprefix(_STORED): x for n, x in tensors.items() if n.startswith(_STORED)}


def _checked(name: str, hyper: object) -> nn.Module:
    if not isinstance(hyper, nn.Module):
        raise ArgumentTypeError(f"hyperparameters.{name} takes a module; got {type(hyper).__name__}.")
    return hyper


def _stored(hyper: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in hyper.state_dict().items() if isinstance(x, Tensor)}


@torch.no_grad()
def _values(hyper: nn.Module) -> dict[str, Tensor]:
    """The values as they are used, by the module's name and their own."""
    values: dict[str, Tensor] = {}
    covered: list[str] = []
    for name, module in hyper.named_modules():
        # Containers of torch have a method of that name with another meaning.
        if isinstance(module, Constrained) and not isinstance(module, nn.ParameterDict | nn.ModuleDict):
            own = module.values()
            prefix = f"{name}." if name else ""
            covered.append(prefix)
            named = own if isinstance(own, Mapping) else {"values": own}
            values |= {prefix + key: torch.as_tensor(x).detach() for key, x in named.items()}
    free = {n: p.detach() for n, p in hyper.named_parameters() if not n.startswith(tuple(covered))}
    return values | free


def _layout_of(tensors: Mapping[str, Tensor], name: str) -> Any:
    x = tensors.get(name)
    return None if x is None else (x.shape, x.dtype)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """The checksum of names, types, shapes and bytes; a safetensors file has none."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _readable(name: str, x: Tensor) -> Any:
    """A tensor as numbers, or in short; what is not finite is None."""
    if x.numel() <= _SHOWN:
        return _finite(x.tolist())
    parts = {"minimum": x.min(), "mean": x.double().mean(), "maximum": x.max()}
    numbers = {key: _finite(float(part)) for key, part in parts.items()}
    return {"shape": list(x.shape), **numbers, "tensor": _VALUES + name}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
