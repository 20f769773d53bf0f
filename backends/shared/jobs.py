"""Programs that the supervisor starts and does not stop for: criu, and merges of layers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from .loop import Loop

TIMED_OUT = -1000  # in place of an exit code


@dataclass(eq=False)
class Job:
    pid: int
    pidfd: int
    deadline: float  # monotonic
    done: Callable[[int], None]  # hears the exit code: negative for a signal, or TIMED_OUT
    late: bool = False


class Jobs:
    """The supervisor's children that are no guests. It is process 1 of its namespace and reaps for all."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._jobs: dict[int, Job] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._jobs

    def start(self, body: Callable[[], object], timeout: float, done: Callable[[int], None]) -> None:
        """Runs `body` in a forked process that leads a session of its own; it may exec. Raises OSError."""
        pid = os.fork()
        if pid == 0:
            _run(body)
        job = Job(pid, os.pidfd_open(pid), time.monotonic() + timeout, done)
        self._jobs[pid] = job
        self.loop.watch(job.pidfd, self.reap)

    def reap(self) -> None:
        """Waits for whoever has ended: jobs, guests whose origin is gone, what criu leaves behind."""
        ended: list[tuple[Job, int]] = []
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                job = self._jobs.pop(pid, None)
                if job is not None:
                    ended.append((job, TIMED_OUT if job.late else os.waitstatus_to_exitcode(status)))
        except ChildProcessError:
            pass
        for job, code in ended:
            self.loop.unwatch(job.pidfd)
            os.close(job.pidfd)
            job.done(code)

    def deadlines(self) -> list[float]:
        return [job.deadline for job in self._jobs.values() if not job.late]

    def expire(self, now: float) -> None:
        """Kills those whose time is over, with what they started."""
        for job in self._jobs.values():
            if job.deadline <= now and not job.late:
                job.late = True
                try:
                    os.killpg(job.pid, signal.SIGKILL)
                except ProcessLookupError:  # it has not come to lead its session yet
                    os.kill(job.pid, signal.SIGKILL)


def _run(body: Callable[[], object]) -> NoReturn:
    try:
        os.setsid()
        body()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)
