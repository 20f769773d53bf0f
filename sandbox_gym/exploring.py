"""Several ways at once: `explore` tries variants in fresh sandboxes, `race` tries actions in copies of one."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from sandbox_gym import _records
from sandbox_gym.api import ExecResult
from sandbox_gym.errors import SandboxError
from sandbox_gym.sandbox import Sandbox

Commands = str | Sequence[str]
Action = Commands | Callable[[Sandbox], Any]
Status = Literal["passed", "failed", "error", "stopped", "waiting"]

_GRACE = 2.0  # seconds after the limit in which commands that were timed out still give their output
_LOOK = 0.2
_START_TIMEOUT = 60.0


@dataclass(frozen=True)
class Trial:
    """How one went. `index`: its place among those given. `status`: "passed"; "failed" (a command did not exit with 0,
    or the check said no); "error" (a call, or a function of yours, raised `error`, be it SystemExit); "stopped"
    (another had won, or time was over); "waiting" (it was never begun). `outputs`: of its commands, the check's last.
    `value`: what its function returned. `duration`: seconds in its sandbox.
    """

    index: int
    name: str
    status: Status = "waiting"
    outputs: tuple[ExecResult, ...] = ()
    value: Any = None
    error: BaseException | None = None
    duration: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class Trials:
    """All that were tried, those that passed first, the fastest of them foremost. `sandbox`: the winner's, alive, and
    yours to terminate, or leave this as a context manager; None, as `winner`, when none has passed. True when one has.
    """

    trials: tuple[Trial, ...]
    winner: Trial | None
    sandbox: Sandbox | None

    def __bool__(self) -> bool:
        return self.winner is not None

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    def __len__(self) -> int:
        return len(self.trials)

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.sandbox is not None:
            self.sandbox.terminate()


def explore(
    variants: Sequence[Commands] | Mapping[str, Commands],
    *,
    image: Any = None,
    timeout: float = 600.0,
    parallel: int | None = None,
    **options: Any,
) -> Trials:
    """Runs each variant in a fresh sandbox of `image`, `parallel` at a time (the number of processors), and keeps the
    sandbox of the fastest whose commands all exit with 0. Every other is gone when this returns, or raises.

    A variant is a command line, or several, one after the other until one fails. `timeout`: seconds for all together.
    `options`: further ones of `Sandbox.create`.

        with explore({"O2": "gcc -O2 x.c && ./a.out", "O3": "gcc -O3 x.c && ./a.out"}, image=image) as tried:
            print(tried.winner, tried.sandbox.read_file("a.out"))

    Raises what `Sandbox.create` raises when no sandbox could be made.
    """

    def make(left: float) -> Sandbox:
        return Sandbox.create(image=image, timeout=min(left, _START_TIMEOUT), **options)

    entries = [_Entry(name, (_lines(lines),)) for name, lines in _named(variants, "variants")]
    return _contest(entries, make, first=False, parallel=parallel, timeout=timeout)


def race(
    sandbox: Sandbox,
    actions: Sequence[Action] | Mapping[str, Action],
    check: str | Callable[[Sandbox], bool],
    *,
    timeout: float = 600.0,
    parallel: int | None = None,
) -> Trials:
    """Forks the sandbox for each action, applies it, and checks; the first copy that passes is kept, and the others are
    killed at once. The sandbox itself goes on as it was.

    An action is a command line, several, or a function that is given the copy; `check` a command line that exits
    with 0, or a function that returns true. `parallel` copies live at a time (the number of processors); `timeout`:
    seconds for all together. A function that still runs then is not waited for: its copy is gone, and its next call
    raises.

        with race(box, patches, "pytest -q") as tried:
            print(tried.winner.name if tried else [trial.outputs[-1].stdout for trial in tried])

    Raises SnapshotError, LimitExceeded: the sandbox can't be forked.
    """
    judge = _Step(check) if callable(check) else _lines(check)
    entries = []
    for name, action in _named(actions, "actions"):
        entries.append(
            _Entry(name, (_Step(action) if callable(action) else _lines(action), judge), callable(check))
        )
    snapshot = sandbox.snapshot()
    try:
        return _contest(
            entries, lambda _: Sandbox.restore(snapshot), first=True, parallel=parallel, timeout=timeout
        )
    finally:
        snapshot.delete()


# ---- what was given -----------------------------------------------------------------------------------------------


class _Step:
    """A function of the caller's."""

    def __init__(self, function: Callable[[Sandbox], Any]) -> None:
        self.function = function


@dataclass(frozen=True)
class _Entry:
    """Steps one after the other, each a function or command lines. `judged`: the last one's value says whether it
    passed.
    """

    name: str
    steps: tuple[_Step | tuple[str, ...], ...]
    judged: bool = False


def _lines(commands: Any) -> tuple[str, ...]:
    lines = (commands,) if isinstance(commands, str) else tuple(commands)
    if not lines or not all(isinstance(line, str) for line in lines):
        raise TypeError(f"a command line, or a list of them, not {commands!r}")
    return lines


def _named(given: Any, what: str) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{what} are a list or a dict, not {given!r}")
    else:
        pairs = [(_title(one), one) for one in given]
    if not pairs:
        raise ValueError(f"{what} are at least one")
    return pairs


def _title(given: Any) -> str:
    if callable(given):
        return str(getattr(given, "__name__", type(given).__name__))
    return given if isinstance(given, str) else "; ".join(map(str, given))


# ---- the contest --------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """The contest is over."""


def _contest(
    entries: Sequence[_Entry],
    make: Callable[[float], Sandbox],
    *,
    first: bool,
    parallel: int | None,
    timeout: float,
) -> Trials:
    _records.check_seconds("timeout", timeout)
    if parallel is not None and (type(parallel) is not int or parallel < 1):
        raise ValueError(f"parallel is an int above 0, not {parallel!r}")
    contest = _Contest(entries, make, first, time.monotonic() + timeout)
    try:
        contest.start(parallel or os.cpu_count() or 1)
        contest.wait()
        contest.stop(keep=True)
    except BaseException:  # Ctrl-C: nobody gets the winner
        contest.stop(keep=False)
        raise
    return contest.result()


class _Contest:
    """Threads that take entries until none is left or it is over. Everything is changed under `_turn`."""

    def __init__(
        self, entries: Sequence[_Entry], make: Callable[[float], Sandbox], first: bool, deadline: float
    ) -> None:
        self._make, self._first, self._deadline = make, first, deadline
        self._waiting = deque(enumerate(entries))
        self._trials = [Trial(index, entry.name) for index, entry in enumerate(entries)]
        self._turn = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._away: set[threading.Thread] = set()  # in a function of the caller's
        self._over = False
        self._boxes: dict[int, Sandbox] = {}
        self._best: tuple[int, Sandbox] | None = None
        self._refusals: list[BaseException] = []  # why sandboxes could not be made

    def start(self, threads: int) -> None:
        for _ in range(min(threads, len(self._trials))):
            thread = threading.Thread(target=self._work, name="contest", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Until all have been tried, one has won, or time is over."""

        def settled() -> bool:
            return len(self._ended) == len(self._threads) or (self._first and self._best is not None)

        self._wait_until(settled, self._deadline + _GRACE)

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        """In short waits: a Ctrl-C that comes just before one is noticed after it."""
        with self._turn:
            while not condition() and (left := deadline - time.monotonic()) > 0:
                self._turn.wait(min(left, _LOOK))

    def stop(self, *, keep: bool) -> None:
        """Ends every sandbox, or all but the winner's; returns when no thread is about to make another. Idempotent."""

        def quiet() -> bool:
            """Ctrl-C may have come before a thread was there: it will see that all is over."""
            there = {thread for thread in self._threads if thread.ident is not None}
            return there <= self._ended | self._away

        with self._turn:
            self._over = True
            boxes = list(self._boxes.values())
            if self._best is not None and not keep:
                boxes.append(self._best[1])
        for box in boxes:
            box.terminate()
        self._wait_until(quiet, float("inf"))

    def result(self) -> Trials:
        if len(self._refusals) == len(self._trials):
            raise self._refusals[0]
        passed = sorted((trial for trial in self._trials if trial.passed), key=lambda trial: trial.duration)
        others = [trial for trial in self._trials if not trial.passed]
        winner, box = (self._trials[self._best[0]], self._best[1]) if self._best else (None, None)
        return Trials((*passed, *others), winner, box)

    def _work(self) -> None:
        try:
            while self._next():
                pass
        finally:
            with self._turn:
                self._ended.add(threading.current_thread())
                self._turn.notify_all()

    def _next(self) -> bool:
        """Tries one entry; False when there is none left."""
        with self._turn:
            left = self._deadline - time.monotonic()
            won = self._first and self._best is not None
            if won or self._over or not self._waiting or left <= 0:
                return False
            index, entry = self._waiting.popleft()
        try:
            box = self._make(left)
        except BaseException as error:
            with self._turn:
                self._refusals.append(error)
                self._trials[index] = replace(self._trials[index], status="error", error=error)
            return True
        with self._turn:
            if not self._over:
                self._boxes[index] = box
                self._trials[index] = replace(self._trials[index], status="stopped")  # until it has ended
        loser: Sandbox | None = box
        try:
            if index in self._boxes:
                trial = self._play(self._trials[index], entry, box)
                loser = self._settle(index, trial, box)
        finally:
            if loser is not None:
                loser.terminate()
        return True

    def _settle(self, index: int, trial: Trial, box: Sandbox) -> Sandbox | None:
        """Takes what came of an entry; the sandbox that is needed no more, None for that of the first winner."""
        with self._turn:
            self._boxes.pop(index)
            if self._over and trial.passed:
                trial = replace(trial, status="stopped")
            self._trials[index] = trial
            if not trial.passed:
                return box
            best = self._best
            if best is not None and (self._first or trial.duration >= self._trials[best[0]].duration):
                return box
            self._best = index, box
            self._turn.notify_all()
            return best[1] if best is not None else None

    def _play(self, trial: Trial, entry: _Entry, box: Sandbox) -> Trial:
        outputs: list[ExecResult] = []
        started = time.monotonic()
        status: Status = "passed"
        value, error = None, None
        try:
            for step in entry.steps:
                if isinstance(step, _Step):
                    with self._outside():
                        said = step.function(box)
                    if entry.judged and step is entry.steps[-1]:
                        status = "passed" if said else "failed"
                    else:
                        value = said
                elif not self._run(step, box, outputs):
                    status = "failed"
                    break
        except (
            BaseException
        ) as raised:  # SystemExit too: it would end this thread, and nobody would take the others
            status, error = "error", raised
        with self._turn:
            if isinstance(error, _Stopped) or (self._over and isinstance(error, SandboxError)):
                status, error = "stopped", None
        spent = time.monotonic() - started
        return replace(trial, status=status, outputs=tuple(outputs), value=value, error=error, duration=spent)

    def _run(self, lines: Sequence[str], box: Sandbox, outputs: list[ExecResult]) -> bool:
        for line in lines:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise _Stopped
            outputs.append(box.shell(line, left))
            if not outputs[-1].ok:
                return False
        return True

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Around a function of the caller's, which nothing can end and nobody waits for."""
        with self._turn:
            if self._over:
                raise _Stopped
            self._away.add(threading.current_thread())
            self._turn.notify_all()
        try:
            yield
        finally:
            with self._turn:
                self._away.discard(threading.current_thread())
                over = self._over
        if over:
            raise _Stopped
