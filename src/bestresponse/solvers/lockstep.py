"""Several iterations side by side, whose products are answered together."""

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from .._tree import Tree
from .system import Product

T = TypeVar("T")
Together = Callable[[dict[str, Tree]], dict[str, Tree]]


class _Ended(Exception):
    """Another iteration has failed, so this one ends."""


def in_lockstep(iterations: Mapping[str, Callable[[Product], T]], together: Together) -> dict[str, T]:
    """The results of iterations, each of which takes a product; one call answers all of those that wait.

    Each iteration runs in a thread, which waits while ``together`` maps the vectors, by iteration, to their products
    in the caller's thread. So only one product is computed at a time, and solvers need no other form for this.

    Raises:
        Exception: that of the iteration, or of ``together``, that failed first.
    """
    events: SimpleQueue[tuple[str, str, Any]] = SimpleQueue()
    answers: dict[str, SimpleQueue[Tree | None]] = {name: SimpleQueue() for name in iterations}
    # A thread begins on the default stream, and would not wait for the products on the caller's.
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None

    def run(name: str, iteration: Callable[[Product], T]) -> None:
        def product(v: Tree) -> Tree:
            events.put((name, "product", v))
            answer = answers[name].get()
            if answer is None:
                raise _Ended
            return answer

        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)
            events.put((name, "result", iteration(product)))
        except BaseException as error:
            events.put((name, "error", error))

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in iterations.items()]
    waiting: dict[str, Tree] = {}
    results: dict[str, T] = {}

    def follow() -> None:
        """Wait until the thread that now runs needs a product or has ended."""
        name, kind, value = events.get()
        if kind == "error":
            raise value
        (waiting if kind == "product" else results)[name] = value

    # One thread runs at a time: several would pass the interpreter's lock to and fro with each operation.
    try:
        for thread in threads:
            thread.start()
            follow()
        while waiting:
            found = together(waiting)
            waiting.clear()
            for name, answer in found.items():
                answers[name].put(answer)
                follow()
        return {name: results[name] for name in iterations}
    finally:
        for queue in answers.values():
            queue.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
