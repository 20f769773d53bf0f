"""Attempts, and the file that they are kept in: a line each, written as soon as it is over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from sandbox_gym.errors import SandboxError

Status = Literal["graded", "timed_out", "error"]


@dataclass(frozen=True)
class Attempt:
    """`number`: from 0 on, of its task's. `status`: "graded"; "timed_out": the policy took too long, which counts as a
    score of 0; or "error": something else than the agent's work failed, the policy's own code or this machine, and
    there is no score (`error` says what). `seconds`: of the policy; `check_seconds`: of judging.
    """

    task: str
    digest: str
    policy: str
    number: int
    status: Status
    score: float | None
    seconds: float
    check_seconds: float = 0.0
    error: str = ""
    verdict: Mapping[str, Any] | None = None

    @property
    def solved(self) -> bool:
        return self.score is not None and self.score >= 1.0


class Results:
    """A JSONL file of attempts, to add to. Those that failed by an error are not among `done`: they are run again."""

    def __init__(self, path: Path, policy: str, *, anew: bool = False) -> None:
        """`anew`: what is in it is deleted. Raises SandboxError when it is another policy's, or another process writes
        to it; OSError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._path = path
        self._file: IO[str] = open(path, "a+", encoding="utf-8", errors="surrogateescape")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise SandboxError(
                f"{path}: another eval writes to it: wait, or give --out another folder"
            ) from None
        self.done: dict[tuple[str, str, int], Attempt] = {}
        try:
            if anew:
                self._file.truncate(0)
            for attempt in self._read(path):
                if attempt.policy != policy:
                    raise SandboxError(
                        f"{path} has attempts of policy {attempt.policy}, not {policy}: give --out another folder, "
                        "or start it over with --anew"
                    )
                if attempt.status != "error":
                    self.done[attempt.task, attempt.digest, attempt.number] = attempt
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> list[Attempt]:
        """All whole lines; what a writer that was killed has left of one is cut off."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._file.truncate(len(whole.encode("utf-8", "surrogateescape")))
        found = []
        for number, line in enumerate(whole.split("\n")[:-1], 1):
            try:
                found.append(Attempt(**json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:
                raise SandboxError(f"{path}:{number}: no attempt: {error}; delete the line") from None
        return found

    def add(self, attempt: Attempt) -> None:
        """Raises SandboxError where it can't be written."""
        try:
            with self._lock:
                self._file.write(json.dumps(asdict(attempt)) + "\n")
                self._file.flush()
        except OSError as error:
            raise SandboxError(
                f"{self._path} can't be written ({error.strerror}): make room, and run the same again, which goes on"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what `add` could not write, and has told of
            self._file.close()
