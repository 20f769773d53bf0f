"""The grader: judges what an agent has left, in a fresh sandbox that the agent was never in.

That sandbox is a copy of the state the task began with, so whatever the agent did outside of its workspace (programs on
PATH, packages, start-up files, processes) is not there. Its changes to the workspace are carried over as files, without
those to protected paths; then come the hidden files, and the check runs, with the network closed. The verdict is an
exit code that the guest's process 1 waited for, and what the check printed or reported. See docs/reward-integrity.md.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import secrets
from collections.abc import Mapping
from pathlib import Path

from sandbox_gym.api import ExecResult
from sandbox_gym.errors import (
    GraderError,
    LimitExceeded,
    ProtocolError,
    SandboxDied,
    SandboxError,
    SandboxTimeout,
)
from sandbox_gym.sandbox import Sandbox, Snapshot
from sandbox_gym.tasks import changes as carrying
from sandbox_gym.tasks import guard, guarded, verdict
from sandbox_gym.tasks.changes import Changes, Listing
from sandbox_gym.tasks.task import Task
from sandbox_gym.tasks.verdict import Judged, Outcome, Unclear, Verdict

_GUARD = {
    "sitecustomize.py": Path(guard.__file__).read_text(),
    "sandbox_gym_guarded.py": Path(guarded.__file__).read_text(),
}
_HARM = (SandboxDied, LimitExceeded, SandboxTimeout, ProtocolError, OSError, ValueError)
_KILLED = (SandboxDied, LimitExceeded)  # by the solution, or by a host that is short of memory, say


class _Broken(Exception):
    """What an agent has left has broken its own sandbox, or the check's."""


class Grader:
    """Judges sandboxes that were restored from `base`, the state at which the task begins. Thread-safe."""

    def __init__(self, task: Task, base: Snapshot, before: Listing) -> None:
        self._task = task
        self._base = base
        self._before = before

    def grade(self, box: Sandbox) -> Verdict:
        """The verdict on a sandbox as it is now. It goes on unharmed.

        A solution that hangs, crashes or floods the check scores 0: the check was proven to work without it.

        Raises:
            GraderError: no check can run here at present.
            SandboxDied: the sandbox was terminated.
        """
        if box.status == "terminated":
            raise SandboxDied(f"sandbox {box.name} was terminated: grade it before")
        try:
            changes = self._collect(box)
        except _Broken as error:
            return Verdict(0.0, "its workspace can't be read", (str(error),), self._task.check)
        try:
            outcome = self._run(changes)
        except _Broken as error:
            return self._verdict(Judged(0.0, f"the check's sandbox broke: {error}"), None, changes)
        try:
            judged = verdict.judge(self._task, outcome)
        except Unclear as error:
            judged = Judged(0.0, f"with its changes the check gave no verdict: {error}")
        return self._verdict(judged, outcome, changes)

    def prove(self) -> Verdict:
        """The verdict on the untouched state, which the check must be able to give; or, where that can't be judged, on
        the task's own solution. Raises GraderError with what the check did instead.
        """
        untouched: Verdict | None = None
        outcome = self._run_alone(Changes())
        try:
            untouched = self._verdict(verdict.judge(self._task, outcome), outcome, Changes())
            trouble = f"it flags the untouched state: {untouched.flags[0]}" if untouched.flags else ""
        except Unclear as error:
            trouble = str(error)
        if trouble and (not self._task.solution or outcome.timed_out):
            raise GraderError(
                f"task {self._task.id}: its check can't judge the untouched state: {trouble}. Let it give a verdict "
                f"on whatever it finds, or give the task a solution to prove it by.\n{_output(outcome)}"
            )
        if not self._task.solution:
            assert untouched is not None
            return untouched
        solved = self._prove_solution()
        return untouched if untouched is not None and not untouched.flags else solved

    def _prove_solution(self) -> Verdict:
        with self._fresh() as box:
            result = box.shell(self._task.solution, self._task.setup_timeout, cwd=self._task.workdir)
            found = self.grade(box)
        if not found.solved:
            raise GraderError(
                f"task {self._task.id}: its own solution scores {found.score:g}: {found.reason}; {found.flags}\n"
                f"the solution ended with {result.exit_code}: {result.stderr[-1000:]}\n"
                f"{found.stdout[-2000:]}\n{found.stderr[-2000:]}"
            )
        return found

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _collect(self, box: Sandbox) -> Changes:
        try:
            return carrying.collect(box, self._task, self._before)
        except _HARM as error:
            self._blame(error)
            raise _Broken(f"{type(error).__name__}: {str(error)[:300]}") from None

    def _run(self, changes: Changes) -> Outcome:
        """A check whose sandbox was killed is tried once more: one that ends so twice has its solution to blame."""
        for attempt in (1, 2):
            try:
                return self._run_alone(changes)
            except GraderError:
                raise
            except _HARM as error:
                if isinstance(error, _KILLED) and attempt == 1:
                    continue
                self._blame(error)
                raise _Broken(f"{type(error).__name__}: {str(error)[:300]}") from None
        raise AssertionError("the second attempt ends it")

    def _blame(self, error: Exception) -> None:
        """Returns if the solution is to blame: a sandbox without it works. Raises GraderError if not even that does."""
        try:
            with self._fresh() as box:
                if box.exec(["/bin/sh", "-c", "exit 7"], 30.0).exit_code == 7:
                    return
        except SandboxError as other:
            error = other
        raise GraderError(f"task {self._task.id}: no check can run at present: {error}") from error

    def _fresh(self) -> Sandbox:
        return Sandbox.restore(self._base, network=None)

    def _run_alone(self, changes: Changes) -> Outcome:
        task = self._task
        try:
            fresh = self._fresh()
        except SandboxError as error:
            raise GraderError(f"task {task.id}: no sandbox for its check: {error}") from error
        with fresh as box:
            carrying.apply(box, changes)
            folder = f"/tmp/{secrets.token_hex(16)}"
            hidden = self._hidden(folder)
            for path, content in hidden.items():
                box.write_file(path, content)
            self._patch(box)
            report = f"{folder}/junit.xml"
            for name, source in _GUARD.items():
                box.write_file(f"{folder}/{name}", source)
            box.write_file(f"{folder}/config.json", json.dumps(self._config(changes, hidden, report)))
            environment = {guard.FOLDER: folder, "PYTHONPATH": folder}
            if task.scoring == "junit":
                environment["SANDBOX_JUNIT"] = report
            result = box.shell(
                _own_path(task.check, folder), task.check_timeout, cwd=task.workdir, env=environment
            )
            return self._outcome(box, result, hidden, report)

    def _config(self, changes: Changes, hidden: Mapping[str, bytes], report: str) -> dict[str, object]:
        files = [*changes.files, *changes.links]
        return {
            "agents": files,
            "new": [path for path in files if path not in self._before],
            "hidden": {
                path: hashlib.sha256(data).hexdigest()
                for path, data in hidden.items()
                if carrying.is_program(path)
            },
            "protected": carrying.programs(self._task, self._before),
            "junit": report if self._task.scoring == "junit" else None,
        }

    def _hidden(self, folder: str) -> dict[str, bytes]:
        """The hidden files as they come into the sandbox, by absolute path."""
        files: dict[str, bytes] = {}
        for path, content in self._task.hidden.items():
            data = content.encode() if isinstance(content, str) else content
            if path.endswith(".sh"):
                data = _own_path(data.decode("utf-8", "surrogateescape"), folder).encode(
                    "utf-8", "surrogateescape"
                )
            files[self._task.path(path)] = data
        return files

    def _patch(self, box: Sandbox) -> None:
        if not self._task.test_patch:
            return
        place = f"/tmp/{secrets.token_hex(16)}"
        box.write_file(place, self._task.test_patch)
        # The files that it changes are as they were at first: it fails only where it does not fit the task.
        result = box.exec(["git", "apply", "--whitespace=nowarn", place], 60.0, cwd=self._task.workdir)
        if not result.ok:
            raise GraderError(
                f"task {self._task.id}: field 'test_patch' does not apply: {result.stderr[:1000]}"
            )
        box.exec(["rm", "-f", place], 10.0)

    def _outcome(self, box: Sandbox, result: ExecResult, hidden: Mapping[str, bytes], report: str) -> Outcome:
        data = None
        if self._task.scoring == "junit" and not result.timed_out:
            # Read through a folder that is listed first: a named pipe or a link is not what the check wrote.
            kinds = {info.path: info.kind for info in box.list_files(posixpath.dirname(report))}
            if kinds.get(report) == "file":
                data = box.read_file(report, max_bytes=verdict.MAX_REPORT)
        return Outcome(
            *(result.exit_code, result.stdout, result.stderr, result.stdout_cut > 0),
            *(
                result.timed_out,
                result.duration,
                data,
                self._written_to(box, hidden, posixpath.dirname(report)),
            ),
        )

    def _written_to(self, box: Sandbox, hidden: Mapping[str, bytes], folder: str) -> str:
        """The program of the check's that is no longer what it was, by whatever the check has run."""
        own = {f"{folder}/{name}": source.encode() for name, source in _GUARD.items()}
        for path, content in {**hidden, **own}.items():
            if not carrying.is_program(path):
                continue
            try:
                if box.read_file(path, max_bytes=len(content) + 1) == content:
                    continue
            except (OSError, LimitExceeded):
                pass
            return path
        return ""

    def _verdict(self, judged: Judged, outcome: Outcome | None, changes: Changes) -> Verdict:
        return Verdict(
            judged.score,
            judged.reason,
            judged.flags,
            check=self._task.check,
            exit_code=outcome.exit_code if outcome else None,
            stdout=verdict.shorten(outcome.stdout) if outcome else "",
            stderr=verdict.shorten(outcome.stderr) if outcome else "",
            tests=judged.tests,
            carried=changes.paths(),
            left_out=dict(sorted(changes.left_out.items())[:1000]),
            duration=outcome.duration if outcome else 0.0,
        )


def _own_path(script: str, folder: str) -> str:
    """PYTHONPATH in a shell's text, for the guard alone: a folder of the agent's in it would come before it."""
    return script.replace("PYTHONPATH=", f"PYTHONPATH={folder} {guard.PATHS}=")


def _output(outcome: Outcome) -> str:
    return f"exit code {outcome.exit_code}\n{outcome.stdout[-2000:]}\n{outcome.stderr[-2000:]}"
