"""How much memory a device has left, and a check before a large allocation."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import OutOfMemoryError

_SMALL = 2**28  # bytes; less than that is not worth a look
_GIB = 2**30


def require_memory(owner: str, needed: Mapping[torch.device, int], advice: str) -> None:
    """Raise before an allocation that cannot succeed.

    Args:
        owner: what needs the memory.
        needed: a lower bound of the bytes, by device.
        advice: what needs less, as a sentence.

    Raises:
        OutOfMemoryError: a device has less.
    """
    for device, size in needed.items():
        if size < _SMALL:
            continue
        free = free_memory(device)
        if free is not None and size > free:
            raise OutOfMemoryError(
                f"{owner} needs at least {_gib(size)} of memory on {device}, which has {_gib(free)} left. {advice}"
            )


def free_memory(device: torch.device) -> int | None:
    """The bytes that a device has left; None if that is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    found = [x for x in (_of_machine(), _of_group()) if x is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    """What Linux can give to new programs, and swap; elsewhere the free pages if they are known."""
    lines = (line.split() for line in _text("/proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3}
    if "MemAvailable:" in sizes:
        return sizes["MemAvailable:"] + sizes.get("SwapFree:", 0)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _of_group(folder: str = "/sys/fs/cgroup") -> int | None:
    """What a container has left of its limit, with the files in its cache, which it can drop."""
    most, used = _text(f"{folder}/memory.max").strip(), _text(f"{folder}/memory.current").strip()
    if not (most.isdigit() and used.isdigit()):
        return None
    cached = (
        line.split()[1] for line in _text(f"{folder}/memory.stat").splitlines() if line.startswith("file ")
    )
    return int(most) - int(used) + int(next(cached, 0))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size < 1000 * _GIB else f"{size / _GIB / 1024:.1f} TiB"
