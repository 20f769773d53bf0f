"""A task whose sandbox was set up once: attempts start from there in milliseconds, and are judged against it."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sysconfig
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from sandbox_gym.errors import TaskError
from sandbox_gym.images.image import Image
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox, Snapshot
from sandbox_gym.tasks import changes, history
from sandbox_gym.tasks.grader import Grader
from sandbox_gym.tasks.task import Task
from sandbox_gym.tasks.verdict import Verdict
from sandbox_gym.template import Template

_MOST_PROVEN = 10_000  # checks of this process
_proven: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
_lock = threading.Lock()


class Prepared:
    """A context manager: leaving it drops the state that attempts start from; those that run go on.

    Raises:
        TaskError: the set-up failed, or the repository has no such commit; the message names the field.
        GraderError: the check can't judge.
        SandboxError: no sandbox could be made.
    """

    def __init__(self, task: Task, *, backend: str = "native") -> None:
        self.task = task
        with _create(task, backend) as box:
            _fill(box, task)
            before = changes.listing(box, task.roots)
            self.snapshot = _keep(box, task)
        self._grader = Grader(task, self.snapshot, before)
        try:
            self.untouched = self._prove(backend)
        except BaseException:
            self.close()
            raise

    def start(self, name: str | None = None) -> Sandbox:
        """A sandbox for an attempt. Its random numbers go on differently in each."""
        return Sandbox.restore(self.snapshot, name, rng="diverge")

    def grade(self, box: Sandbox) -> Verdict:
        """See `Grader.grade`: the verdict on an attempt's sandbox as it is now."""
        return self._grader.grade(box)

    def close(self) -> None:
        self.snapshot.delete()

    def _prove(self, backend: str) -> Verdict:
        """Once for each task in a process: its check is proven when the first sandbox of it is made."""
        key = backend, self.task.digest
        with _lock:
            known = _proven.get(key)
        if known is None:
            known = self._grader.prove()
            with _lock:
                _proven[key] = known
                while len(_proven) > _MOST_PROVEN:
                    _proven.popitem(last=False)
        return known

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _keep(box: Sandbox, task: Task) -> Snapshot:
    """The state at which attempts begin, with the network that they have: a rewind brings that back."""
    kept = box.snapshot(f"task {task.id}")
    if task.network == task.setup_network:
        return kept
    try:
        with Sandbox.restore(kept, network=_rules(task.network)) as other:
            return other.snapshot(f"task {task.id}")
    finally:
        kept.delete()


def _rules(hosts: tuple[str, ...] | None) -> Allow | None:
    return Allow(list(hosts)) if hosts else None


def _create(task: Task, backend: str) -> Sandbox:
    rules = _rules(task.setup_network)
    # A task's defaults are a sandbox's: a backend that can't enforce one of them warns, and refuses what was asked for.
    limits: dict[str, Any] = {
        entry.name: getattr(task, entry.name)
        for entry in dataclasses.fields(task)
        if entry.name in ("cpus", "memory", "disk", "pids") and getattr(task, entry.name) != entry.default
    }
    image: Any = _image(task.image)
    if task.template is not None:
        image = Template.get(task.template)
    # A project that is installed in place may have the task in it, with all that is hidden.
    packages = (
        None if image is not None else sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    return Sandbox.create(backend=backend, image=image, network=rules, python_path=packages, **limits)


def _image(image: str | None) -> Image | str | None:
    if image is None:
        return None
    path = Path(image)
    if path.is_file() and path.name.partition(".")[0] == "Dockerfile":
        return Image.from_dockerfile(path)
    return Image.from_dockerfile(path) if (path / "Dockerfile").is_file() else image


def _fill(box: Sandbox, task: Task) -> None:
    """Files, repository and set-up. Raises TaskError."""
    if task.repo is not None:
        if not os.path.isdir(task.repo):
            raise TaskError(f"task {task.id}: field 'repo': {task.repo!r} is no folder that is there")
        history.clone(box, task)
    for root in task.roots:
        made = box.exec(["/bin/sh", "-c", '[ -d "$0" ] || mkdir -p "$0"', root], 10.0)
        if not made.ok:
            raise TaskError(
                f"task {task.id}: its folder {root} can't be made in its image: {made.stderr.strip()[:1000]}"
            )
    for path, content in task.files.items():
        box.write_file(task.path(path), content)
    for number, line in enumerate(task.setup, 1):
        result = box.shell(line, task.setup_timeout, cwd=task.workdir)
        if not result.ok:
            how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
            output = f"{result.stdout}{result.stderr}".strip()[-4000:]
            raise TaskError(
                f"task {task.id}: field 'setup': line {number}, {shlex.quote(line)[:200]}, {how}\n{output}"
            )
    if task.base_commit is not None:
        history.forget_later(box, task)
