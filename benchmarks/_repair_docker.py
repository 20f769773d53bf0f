"""Attempts at a task by the commands of docker alone, as people do without sandboxes: `docker run` for the agent, and
`docker run` for the tests, of an image with the task in it.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._backends_docker import by_hand
from sandbox_gym.tasks import Task, prepared, verdict

_PATIENCE = 120.0  # seconds of any command beside a check
_REPORT = "/tmp/report.xml"


@dataclass(frozen=True)
class Done:
    """What a command in a container came to; as `Sandbox.exec` says it."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Bare:
    """A task as an image: set up once, as `Prepared` is. A context manager; leaving it removes the image."""

    def __init__(self, task: Task) -> None:
        self.task = task
        with prepared._create(task, "docker") as box:
            prepared._fill(box, task)
            container, options = by_hand(box)
            self._image = _docker("commit", container).stdout.decode().strip()
        self._options = ["--detach", *options]
        # As a grader of ours leaves it out: so both run the same tests of the same files.
        self._left_out = [f":(exclude,glob)**/{name}" for name in task.protected]

    def attempt(self, answer: Callable[[Container], None]) -> tuple[float, float]:
        """Score, and seconds from nothing to verdict."""
        start = time.perf_counter()
        with self._run() as agent:
            answer(agent)
            agent.exec(["git", "add", "-A"])
            patch = agent.exec(
                ["git", "diff", "--cached", "--binary", "HEAD", "--", ".", *self._left_out]
            ).stdout
        with self._run() as judge:
            if patch:
                judge.exec(["git", "apply", "-"], stdin=patch)
            judge.unpack({self.task.path(path): content for path, content in self.task.hidden.items()})
            score = self._check(judge)
        return score, time.perf_counter() - start

    def _run(self) -> Container:
        return Container(
            _docker("run", *self._options, self._image, "sleep", "infinity").stdout.decode().strip()
        )

    def _check(self, judge: Container) -> float:
        environment = {"PYTEST_ADDOPTS": f"--junitxml={_REPORT}"}
        start = time.perf_counter()
        done = judge.exec(["sh", "-c", self.task.check], self.task.check_timeout, env=environment)
        report = judge.exec(["cat", _REPORT]).stdout
        texts = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        seconds = time.perf_counter() - start
        outcome = verdict.Outcome(done.exit_code, *texts, False, False, seconds, report or None)
        try:
            return verdict.judge(self.task, outcome).score
        except verdict.Unclear:  # a package that can't be imported has no report
            return 0.0

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *exc_info: object) -> None:
        _docker("rmi", "--force", "--no-prune", self._image)


class Container:
    """One that runs, with as much of a Sandbox as an answer needs."""

    def __init__(self, container: str) -> None:
        self._id = container

    def exec(
        self,
        argv: Sequence[str],
        timeout: float = _PATIENCE,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Done:
        where = [] if cwd is None else [f"--workdir={cwd}"]
        variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
        return _docker(
            "exec", "--interactive", *where, *variables, self._id, *argv, stdin=stdin, timeout=timeout
        )

    def read_text(self, path: str) -> str:
        return self.exec(["cat", path]).stdout.decode()

    def write_file(self, path: str, content: str | bytes) -> None:
        self.unpack({path: content})

    def unpack(self, files: Mapping[str, str | bytes]) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, content in files.items():
                data = content.encode() if isinstance(content, str) else content
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(data), 0o644
                tar.addfile(entry, io.BytesIO(data))
        done = self.exec(["tar", "-x", "-C", "/"], stdin=archive.getvalue())
        assert done.ok, done.stderr

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exc_info: object) -> None:
        _docker("rm", "--force", self._id)


def _docker(*arguments: str, stdin: bytes = b"", timeout: float = _PATIENCE) -> Done:
    """Raises CalledProcessError where docker itself fails; what runs inside may."""
    done = subprocess.run(
        ["docker", *arguments], check=False, input=stdin, capture_output=True, timeout=timeout
    )
    if arguments[0] != "exec":
        done.check_returncode()
    return Done(done.returncode, done.stdout, done.stderr)
