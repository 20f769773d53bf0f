"""Runs attempts side by side: each in a copy of its task's prepared sandbox, judged when the policy returns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_gym._records import check_seconds
from sandbox_gym.backends import lookup
from sandbox_gym.errors import LimitExceeded, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.evals import progress, report
from sandbox_gym.evals.attempts import Attempt, Results
from sandbox_gym.evals.policies import Policy
from sandbox_gym.evals.summary import Summary, summarize
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task

_LOOK = 0.2  # seconds between looks whether the eval was given up
_GRACE = 5.0  # seconds that a policy has to return once its sandbox is gone


def evaluate(
    tasks: Sequence[Task],
    policy: Policy,
    *,
    k: int = 1,
    out: str | os.PathLike[str] | None = None,
    anew: bool = False,
    workers: int | None = None,
    timeout: float = 1800.0,
    backend: str = "native",
    name: str | None = None,
    show_progress: bool = False,
) -> Summary:
    """`k` attempts at each task, `workers` of them at a time (by default one for each processor).

    `timeout`: seconds that the policy has for an attempt; then its sandbox is terminated, and the score is 0. `out`: a
    folder for results.jsonl, to which each attempt goes when it is over, and report.html. Where it has attempts of this
    policy (by `name`: module and function) already, only what is missing, or failed by an error, is run. Whether the
    policy's code has changed since can't be seen: `anew` deletes what is there, and runs all.

    What a policy raises, and what this machine lacks, are errors of the attempt: counted apart, never as 0. But a
    sandbox that its agent has ended is judged, and scores 0.

    Raises ValueError; BackendUnavailable where this machine has no such backend; SandboxError where `out` has attempts
    of another policy, or another process writes to it.
    """
    check_seconds("timeout", timeout)
    if k < 1 or (workers is not None and workers < 1):
        raise ValueError("k and workers are 1 or more")
    if len({task.id for task in tasks}) < len(tasks):
        raise ValueError("each task has an id of its own")
    lookup.get(backend)  # before `anew` deletes anything for attempts that would all fail
    known = name or _name(policy)
    out = None if out is None else os.path.abspath(out)  # a policy may go to another folder
    results = Results(Path(out) / "results.jsonl", known, anew=anew) if out is not None else None
    try:
        if anew and out is not None:
            # If this run is stopped, it would tell of attempts that are gone.
            (Path(out) / "report.html").unlink(missing_ok=True)
        started = time.monotonic()
        runner = _Runner(policy, known, timeout, backend)
        wanted = [(task, number) for task in tasks for number in range(k)]
        done = results.done if results is not None else {}
        before = [found for task, i in wanted if (found := done.get((task.id, task.digest, i))) is not None]
        missing = [(task, i) for task, i in wanted if (task.id, task.digest, i) not in done]
        attempts = list(before)
        with progress.shown(len(wanted), before, show_progress) as tick:
            for attempt in runner.run(missing, workers or os.cpu_count() or 1):
                if results is not None:
                    results.add(attempt)
                attempts.append(attempt)
                tick(attempt)
        order = {task.id: i for i, task in enumerate(tasks)}
        attempts.sort(key=lambda attempt: (order[attempt.task], attempt.number))
        summary = summarize(known, k, attempts, time.monotonic() - started, from_before=len(before))
        if out is not None:
            report.write(Path(out) / "report.html", summary)
        return summary
    finally:
        if results is not None:
            results.close()


def _name(policy: Policy) -> str:
    function = getattr(policy, "__qualname__", type(policy).__qualname__)
    return f"{getattr(policy, '__module__', '')}:{function}"


class _NotPrepared(Exception):
    """Says what preparing the task has raised, for each attempt at it."""


@dataclass
class _Base:
    """A task's prepared sandbox, made by the first attempt that needs it; the last one drops it."""

    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    prepared: Prepared | None = None
    error: str = ""


class _Runner:
    def __init__(self, policy: Policy, name: str, timeout: float, backend: str) -> None:
        self._policy, self._name, self._timeout, self._backend = policy, name, timeout, backend
        self._bases: dict[str, _Base] = {}
        self._stop = threading.Event()

    def run(self, wanted: Sequence[tuple[Task, int]], workers: int) -> Generator[Attempt, None, None]:
        """The attempts, as they end."""
        for task, _ in wanted:
            self._bases.setdefault(task.id, _Base(0)).left += 1
        ended: list[Attempt] = []
        ready = threading.Condition()

        def one(task: Task, number: int) -> None:
            attempt = self._attempt(task, number)
            with ready:
                ended.append(attempt)
                ready.notify()

        pool = ThreadPoolExecutor(workers, "sandbox-gym-eval")
        try:
            for task, number in wanted:
                pool.submit(one, task, number)
            for _ in wanted:
                with ready:
                    while not ended:
                        ready.wait()
                    attempt = ended.pop(0)
                yield attempt
        finally:  # early, when the caller has had enough: what runs is ended, and what has not begun does not
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            for base in self._bases.values():
                if base.prepared is not None:
                    base.prepared.close()

    def _attempt(self, task: Task, number: int) -> Attempt:
        """Never raises, but for what ends the process."""
        started = time.monotonic()
        try:
            with self._base(task) as prepared, prepared.start() as box:
                return self._play(prepared, box, number)
        except Exception as error:
            said = str(error) if isinstance(error, _NotPrepared) else f"{type(error).__name__}: {error}"
            return self._record(task, number, "error", None, time.monotonic() - started, error=said)

    @contextmanager
    def _base(self, task: Task) -> Iterator[Prepared]:
        base = self._bases[task.id]
        try:
            with base.lock:
                if base.prepared is None and not base.error:
                    try:
                        base.prepared = Prepared(task, backend=self._backend)
                    except Exception as error:
                        base.error = f"{type(error).__name__}: {error}"
            if base.prepared is None:
                raise _NotPrepared(base.error)
            yield base.prepared
        finally:
            with base.lock:
                base.left -= 1
                if not base.left and base.prepared is not None:
                    base.prepared.close()

    def _play(self, prepared: Prepared, box: Sandbox, number: int) -> Attempt:
        task, started = prepared.task, time.monotonic()
        raised = self._within(box, lambda: self._policy(task, box))
        seconds = time.monotonic() - started
        if seconds >= self._timeout and box.status == "terminated":
            return self._record(task, number, "timed_out", 0.0, seconds)
        # An agent that has ended its own sandbox is judged as it left it: it has no accident to hide behind.
        if raised is not None and not (
            isinstance(raised, (SandboxDied, LimitExceeded, SandboxTimeout)) and box.status == "dead"
        ):
            raise raised
        verdict = prepared.grade(box)
        taken = time.monotonic() - started - seconds
        return self._record(task, number, "graded", verdict.score, seconds, taken, verdict=verdict.to_json())

    def _record(self, task: Task, number: int, status: str, *values: object, **more: object) -> Attempt:
        return Attempt(task.id, task.digest, self._name, number, status, *values, **more)  # type: ignore[arg-type]

    def _within(self, box: Sandbox, function: Callable[[], object]) -> Exception | None:
        """Calls it in a thread of its own, and terminates the sandbox when time is up: its next call there then raises.
        One that does not even return then is left behind, with a thread that no one waits for. Returns what it raised.
        """
        raised: list[Exception] = []

        def call() -> None:
            try:
                function()
            except Exception as error:
                raised.append(error)
            except BaseException as error:  # sys.exit() in an agent's own program, say
                raised.append(SandboxError(f"the policy raised {type(error).__name__}: {error}"))

        thread = threading.Thread(target=call, name="sandbox-gym-policy", daemon=True)
        deadline = time.monotonic() + self._timeout
        thread.start()
        while thread.is_alive() and not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, _LOOK))
        if thread.is_alive():
            box.terminate()
            thread.join(_GRACE)
            return SandboxError("it did not return in time")
        return raised[0] if raised else None
