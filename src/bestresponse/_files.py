"""Files that are whole at any time: either the old one or the new one."""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import ArgumentTypeError, Error, FileError


@contextmanager
def replacing(path: str | Path, owner: str, previous: bool = False) -> Iterator[IO[bytes]]:
    """A file to write the new content into, which takes the place of ``path`` at the end.

    A symbolic link stays one, and the file keeps its mode. After an error or a kill, the old file is as it was.

    Args:
        path: the place of the file.
        owner: what writes it, for messages.
        previous: whether to keep the old file as `previous_of` the path.

    Raises:
        FileError: the file cannot be written.
    """
    target = _checked(path, owner)
    part = target.with_name(f".{target.name}.part")
    with file_errors(path, owner):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            old = None
            if target.exists():
                shutil.copymode(target, part)
                old = _second(target) if previous else None
            part.replace(target)
            if old is not None:
                old.replace(previous_of(target))
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def replace_text(path: Path, text: str, owner: str) -> None:
    """Replace a file by a text in UTF-8; arguments and errors are those of `replacing`."""
    with replacing(path, owner) as file:
        file.write(text.encode())


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write to a file without a buffer, which may take a part at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def as_path(name: str, path: object) -> Path:
    """A path from a text or a path.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"{name} must be a path; got {path!r}. Pass a str or a pathlib.Path.")
    return Path(path)


def previous_of(path: str | Path) -> Path:
    """The place of the file before the last one."""
    target = Path(os.path.realpath(path))
    return target.with_name(f"{target.name}.previous")


@contextmanager
def file_errors(path: str | Path, owner: str) -> Iterator[None]:
    """Replace an error of the system, also one that torch hides, by a sentence."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        raise FileError(
            f"{owner} needs a path of a file that can be written; got {str(path)!r}: {cause.strerror or cause}. An old "
            "file there is unchanged. Free some space, or choose another place."
        ) from cause


def _checked(path: str | Path, owner: str) -> Path:
    """The file that a path leads to.

    Raises:
        FileError: it is a folder, a device, or a file without a permission to write.
    """
    path = as_path(f"{owner}'s path", path)
    wrong = f"{owner} needs a path of a file that can be written; got {str(path)!r}"
    if not Path(path).name:
        raise FileError(f"{wrong}, which names no file. Add a name.")
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
    except (OSError, ValueError) as error:  # a null character, or a folder that cannot be read
        raise FileError(f"{wrong}: {getattr(error, 'strerror', None) or error}. Choose another.") from error
    if mode is not None and not stat.S_ISREG(mode):
        kind = "Is a directory" if stat.S_ISDIR(mode) else "Not a regular file"
        raise FileError(f"{wrong}: {kind}. Choose another.")
    # The superuser may write to any file; one that is marked as read-only is kept all the same.
    if mode is not None and not (mode & 0o222 and os.access(target, os.W_OK)):
        raise FileError(f"{wrong}: the file is read-only. Choose another, or make it writable.")
    return target


def _second(target: Path) -> Path:
    """A second name of the file, or a copy on a file system without links."""
    second = target.with_name(f".{target.name}.previous.part")
    second.unlink(missing_ok=True)
    try:
        os.link(target, second)
    except OSError:
        shutil.copy2(target, second)
    return second


def _cause(error: BaseException | None) -> OSError | None:
    """The error of the system behind an error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
