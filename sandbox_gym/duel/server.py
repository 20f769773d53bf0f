"""The local web page on which duels are decided. Loopback only; a random token; nothing from other origins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from http import HTTPStatus
from typing import Any

from sandbox_gym._pages import Pages, Refusal
from sandbox_gym.duel import preferences
from sandbox_gym.duel.page import page
from sandbox_gym.duel.pairs import Duel


def serve(
    duels: Iterable[Duel],
    path: str | os.PathLike[str],
    *,
    n: int,
    on_ready: Callable[[str], object] = print,
    port: int = 0,
) -> int:
    """Shows duels on a page of this machine, and appends each choice to a JSONL file, until `n` are made, there are no
    more, or the page's reader quits. Returns how many were made.

    `on_ready` is given the page's address: whoever has it can choose. Raises what `duels` and the file do.
    """
    table = Table(duels, path, n)
    writes = {"/choice": table.choose, "/quit": lambda _: {"done": True, "made": table.made}}
    server = Pages(page, {"/duel": lambda _: table.show()}, writes, port=port, sent=table.sent)
    try:
        with server.served():
            on_ready(server.address)
            table.over.wait()
    finally:
        table.close()
    if table.failure is not None:
        raise table.failure
    return table.made


class Table:
    """The duel that lies on it, and what becomes of it. Thread-safe."""

    def __init__(self, duels: Iterable[Duel], path: str | os.PathLike[str], n: int) -> None:
        if n < 1:
            raise ValueError(f"n is 1 or more, not {n}")
        self.made = 0
        self.over = threading.Event()
        self.failure: Exception | None = None
        self._duels = iter(duels)
        self._path = path
        self._n = n
        self._lock = threading.Lock()
        self._duel: Duel | None = None

    def show(self) -> dict[str, Any]:
        """The present duel for the page; {"done": True} when there is none."""
        with self._lock:
            return self._show()

    def choose(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Stores a choice; the next duel. Raises ValueError for what is no choice, Refusal for one that is too late or
        can't be stored.
        """
        with self._lock:
            choice = wish.get("choice")
            if choice not in preferences.CHOICES:
                raise ValueError(f"a choice is one of {', '.join(preferences.CHOICES)}")
            if wish.get("number") != self.made or self._duel is None or self.over.is_set():
                # A second click, an old page.
                raise Refusal(HTTPStatus.CONFLICT, "that duel is decided: load the page again")
            try:
                preferences.append(self._path, self._duel, choice)
            except OSError as error:
                self.failure = error
                problem = f"it could not be stored: {error}"
                raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, problem) from error
            self.made += 1
            self._duel = None
            return self._show()

    def sent(self, answer: dict[str, Any] | Refusal) -> None:
        """The page has been told: after the last answer it is over."""
        failed = isinstance(answer, Refusal) and answer.status == HTTPStatus.INTERNAL_SERVER_ERROR
        if failed or (isinstance(answer, dict) and answer.get("done")):
            self.over.set()

    def close(self) -> None:
        """Closes the duels, where they are a generator."""
        with self._lock:  # not while it makes one
            if isinstance(self._duels, Generator):
                self._duels.close()

    def _show(self) -> dict[str, Any]:
        if self._duel is None and self.made < self._n and self.failure is None:
            try:
                self._duel = next(self._duels, None)
            except Exception as error:  # serve raises it
                self.failure = error
        if self._duel is None:
            problem = None if self.failure is None else str(self.failure)
            return {"done": True, "made": self.made, "problem": problem}
        duel = self._duel
        return {"number": self.made, "of": self._n, "prefix": duel.prefix, "a": duel.a, "b": duel.b}
