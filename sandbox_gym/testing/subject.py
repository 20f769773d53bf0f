"""What a check acts on, and the words it is written in. All that a check makes ends with it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.testing import servers

PATIENCE = 60.0  # seconds that whatever must happen may take
_TURN = 0.02


class Subject:
    """A backend by its name, and the image that its sandboxes are made of where a check does not choose its own."""

    def __init__(self, backend: str, image: Any = None) -> None:
        self.backend = backend
        self.image = image
        self.boxes: list[Sandbox] = []
        self._stack = contextlib.ExitStack()

    def create(self, name: str | None = None, **options: Any) -> Sandbox:
        """A sandbox of this backend, with the options of `Sandbox.create`."""
        return self.own(Sandbox.create(name, **{"backend": self.backend, "image": self.image, **options}))

    def restore(self, snapshot: Snapshot, **how: Any) -> Sandbox:
        return self.own(Sandbox.restore(snapshot, **how))

    def fork(self, box: Sandbox, n: int = 1, **how: Any) -> list[Sandbox]:
        return [self.own(copy) for copy in box.fork(n, **how)]

    def snapshot(self, box: Sandbox, **how: Any) -> Snapshot:
        snapshot = box.snapshot(**how)
        self.later(snapshot.delete)
        return snapshot

    def own(self, box: Sandbox) -> Sandbox:
        """Ends it with the check."""
        self.boxes.append(box)
        self.later(box.terminate)
        return box

    def folder(self) -> Path:
        """A new folder of this host."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-gym-check-")))

    def web(self) -> str:
        """`address:port`, on this host's loopback, of a new server that answers `GET /x` with `GET host/x`."""
        return self._stack.enter_context(servers.web())

    def echo(self) -> str:
        """The same of one that says hello to who connects, then sends back all it gets."""
        return self._stack.enter_context(servers.echo())

    def later(self, function: Callable[[], object]) -> None:
        """At the check's end, the last first."""
        self._stack.callback(function)

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Behaviour:
    """What a backend must do. `name`: its topic and what holds ("fork.siblings_are_sealed"); `meaning`: a sentence."""

    name: str
    meaning: str
    run: Callable[[Subject], None]


catalogue: dict[str, Behaviour] = {}


def check(topic: str) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Puts a function into the catalogue, as `topic.its_name`; its docstring is the meaning."""

    def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        name = f"{topic}.{function.__name__}"
        assert name not in catalogue and function.__doc__, name
        catalogue[name] = Behaviour(name, " ".join(function.__doc__.split()), function)
        return function

    return add


# ---- the words of checks --------------------------------------------------------------------------------------------


def expect(got: Any, wanted: Any, what: str) -> None:
    """Raises AssertionError where they differ."""
    assert got == wanted, f"{what}: {got!r}, not {wanted!r}"


def value(box: Sandbox, code: str, timeout: float = PATIENCE) -> str | None:
    """What a cell's last expression gives, as its repr. Raises AssertionError where the cell fails."""
    result = box.run_code(code, timeout=timeout)
    last = code.strip().rpartition("\n")[2]
    assert result.ok, f"{last!r} in {box.name}: {result.error or 'timed out'}\n{result.stderr}"
    return result.value


def output(box: Sandbox, command: str, timeout: float = PATIENCE) -> str:
    """What a command line prints. Raises AssertionError where it fails."""
    result = box.shell(command, timeout=timeout)
    assert result.ok, f"{command!r} in {box.name}: {result}"
    return result.stdout


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Waits for it. Raises AssertionError where it does not come true."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"{patience:g} s later still not so: {what}"
        time.sleep(_TURN)


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], what: str) -> Any:
    """Raises AssertionError where nothing of that kind comes; anything else goes through."""
    try:
        yield
    except kind:
        return
    names = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
    raise AssertionError(f"{what}: no {names} was raised")


PROCESSES = """
import os
def processes():
    'The command lines of all that runs here.'
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/stat') as stat, open(f'/proc/{pid}/cmdline', 'rb') as line:
                if stat.read().rpartition(')')[2].split()[0] not in 'ZX':
                    found.append(line.read().replace(b'\\0', b' ').decode().strip())
        except OSError:
            continue
    return found
"""


def running(box: Sandbox, line: str) -> int:
    """How many processes with that command line run in it."""
    return int(value(box, f"{PROCESSES}processes().count({line!r})") or 0)
