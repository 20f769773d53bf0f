"""The commands of runsc: run, restore, checkpoint, kill. Each is a job of the supervisor, with a deadline.

A sandbox has come when its command has ended well and its guest has spoken on its own standard output: a fresh one
announces itself, and a restored one answers a request that waited for it in its new standard input.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox_gym.api import Limits
from sandbox_gym.backends.egress.gateway import Gateway
from sandbox_gym.backends.egress.network import changed_variables, variables
from sandbox_gym.backends.native.cgroups import Groups
from sandbox_gym.backends.shared.jobs import TIMED_OUT, Jobs
from sandbox_gym.guest.wire import HEADER, Op, Status, encode
from sandbox_gym.network import Allow

from . import wires
from .box import Box, Image
from .bundle import Family, write_config

_KILL_SECONDS = 20.0
# Of host processes: gVisor has two and some threads for each of the guest's; its own limit comes first.
_HOST_PIDS_EACH, _HOST_PIDS = 8, 512
_KERNEL_BYTES = 16 << 20  # of memory, for gVisor itself: the limit is the guest's
_MOST_TEXT = 1000  # characters


@dataclass(frozen=True)
class Failure:
    """Why a sandbox has not come. `late`: its time was over."""

    text: str
    late: bool = False


Done = Callable[[Box, "Failure | None"], None]


@dataclass(eq=False)
class Coming:
    """A sandbox in the making. `done` is called once."""

    box: Box
    done: Done
    deadline: float
    command_ended: bool = False
    spoken: bytes = b""

    @property
    def word(self) -> int | None:
        """The op of the guest's first frame, once it is there."""
        return HEADER.unpack(self.spoken)[0] if len(self.spoken) == HEADER.size else None


class Engine:
    def __init__(
        self, jobs: Jobs, groups: Groups, gateway: Gateway, runsc: str, folder: Path, images: Path
    ) -> None:
        self.jobs = jobs
        self.groups = groups
        self.gateway = gateway
        self.images = images
        self._runsc = runsc
        self._boxes = folder / "boxes"
        self._boxes.mkdir()
        self.coming: list[Coming] = []

    # ---- coming ---------------------------------------------------------------------------------------------------

    def run(self, family: Family, name: str | None, timeout: float, done: Done) -> Box:
        """A fresh sandbox. Raises OSError, BackendUnavailable."""
        return self._start(["run"], family, family.spec.network, name, b"", timeout, done)

    def restore(
        self,
        image: Image,
        allow: Allow | None,
        name: str | None,
        timeout: float,
        done: Done,
    ) -> Box:
        """A copy, which may reach these. Raises OSError, BackendUnavailable."""

        def ended(box: Box, failure: Failure | None) -> None:
            image.readers -= 1
            image.drop_unneeded()
            done(box, failure)

        command = ["restore", f"--image-path={image.folder}"]
        image.readers += 1
        try:
            request = _first_request(image.network, allow)
            return self._start(command, image.family, allow, name, request, timeout, ended)
        except BaseException:
            image.readers -= 1
            raise

    def _start(
        self,
        command: list[str],
        family: Family,
        allow: Allow | None,
        name: str | None,
        request: bytes,
        timeout: float,
        done: Done,
    ) -> Box:
        key = secrets.token_hex(6)
        box = Box(
            key, self._boxes / key, family, self.groups.make(key, _of_host(family.spec.limits)), name or ""
        )
        box.network = allow
        theirs: list[int] = []
        try:
            box.folder.mkdir()
            netns = self._connect(box, allow) if allow is not None else None
            write_config(box.folder, family, variables=variables(allow, wires.PLACE), netns=netns)
            stdin, writes = os.pipe()
            theirs.append(stdin)
            box.ends = (writes,)
            reads, stdout = os.pipe()
            theirs.append(stdout)
            box.ends = (reads, writes)
            box.messages, stderr = os.pipe()
            theirs.append(stderr)
            os.write(writes, request)
            argv = [*self._command(box), command[0], "--detach", f"--pid-file={box.folder}/pid"]
            argv += [f"--bundle={box.folder}", *command[1:], key]
            coming = Coming(box, done, time.monotonic() + timeout)
            self.jobs.start(
                lambda: _become(argv, theirs, box.group.join_fds),
                timeout,
                lambda code: self._ended(coming, code),
            )
        except BaseException:
            box.close()
            box.remove()
            raise
        finally:
            box.group.close_join()
            for fd in theirs:
                os.close(fd)
        self.coming.append(coming)
        self.jobs.loop.watch(reads, lambda: self._speaks(coming))
        self.jobs.loop.watch(box.messages, lambda: self._prints(box))
        return box

    def _connect(self, box: Box, allow: Allow) -> str:
        """Opens its way to what it may reach. The path of its network namespace, until it has come."""
        box.wires = wires.make(allow)
        box.outlet = self.gateway.open(box.wires.gateway, allow)
        return f"/proc/{os.getpid()}/fd/{box.wires.guest}"

    def _command(self, box: Box) -> list[str]:
        # Else connections that have ended not long ago, too, would be in a checkpoint's way.
        network = ["--network=none"] if box.network is None else ["--network=sandbox", "--net-disconnect-ok"]
        options = ["--platform=systrap", *network, "--overlay2=none", "--ignore-cgroups"]
        # Else gVisor's kernel itself runs as root with capabilities, to open files without asking: a quarter faster.
        return [self._runsc, f"--root={box.folder}/state", *options, "--directfs=false"]

    def _speaks(self, coming: Coming) -> None:
        reads = coming.box.ends[0]
        block = os.read(reads, HEADER.size - len(coming.spoken))
        coming.spoken += block
        if coming.word is not None:
            self.jobs.loop.unwatch(reads)
            self._look(coming)
        elif not block:
            self.jobs.loop.unwatch(reads)
            self._settle(coming, Failure("its process ended before it spoke"))

    def _prints(self, box: Box) -> None:
        if not box.hear():
            self.jobs.loop.unwatch(box.messages)

    def _ended(self, coming: Coming, code: int) -> None:
        if coming not in self.coming:
            return
        if code == TIMED_OUT:
            self._settle(coming, Failure("it did not start in time", late=True))
        elif code:
            self._settle(coming, Failure(f"runsc ended with {code}"))
        else:
            coming.command_ended = True
            self._look(coming)

    def _look(self, coming: Coming) -> None:
        if not coming.command_ended or coming.word is None:
            return
        if coming.word not in (Op.READY, Op.PING, Op.ADOPT):
            self._settle(coming, Failure("its guest spoke otherwise than one does"))
            return
        try:
            coming.box.arrived()
        except (OSError, ValueError) as error:
            self._settle(coming, Failure(f"its process is gone ({error})"))
        else:
            self._settle(coming, None)

    def _settle(self, coming: Coming, failure: Failure | None) -> None:
        self.coming.remove(coming)
        box = coming.box
        if box.wires is not None:
            box.wires.leave_guest()
        if failure is not None:
            self.jobs.loop.unwatch(box.ends[0])
            self._hear_all(box)
            said = box.said.decode("utf-8", "replace").strip()[-_MOST_TEXT:]
            text = f"{failure.text}: {said}" if said else failure.text
            if box.group.oom_kills():
                text = f"its memory limit is too small for a guest: {text}"
            failure = Failure(text, failure.late)
        coming.done(box, failure)

    def _hear_all(self, box: Box) -> None:
        os.set_blocking(box.messages, False)
        try:
            while box.hear():
                pass
        except BlockingIOError:
            pass

    def expire(self, now: float) -> None:
        for coming in [coming for coming in self.coming if coming.deadline <= now]:
            self._settle(coming, Failure("its guest did not answer in time", late=True))

    def deadlines(self) -> list[float]:
        return [coming.deadline for coming in self.coming]

    # ---- while it lives -------------------------------------------------------------------------------------------

    def checkpoint(self, box: Box, timeout: float, done: Callable[[Image | None, str], None]) -> None:
        """The sandbox goes on. `done` hears of the image, or why there is none. Raises OSError."""
        image = Image(secrets.token_hex(6), Path(), box.family, box.network, origin=box.origin)
        image.folder = self.images / image.id
        image.folder.mkdir()

        def ended(code: int, said: str) -> None:
            if code == 0 and image.is_whole():
                done(image, "")
                return
            image.held = False
            image.drop_unneeded()
            if code == TIMED_OUT:  # it may stand still for ever
                box.kill(f"a checkpoint of it did not end within {timeout} s")
                done(None, box.reason)
            else:
                done(None, said or f"runsc checkpoint ended with {code}")

        command = ["checkpoint", "--compression=none", "--leave-running", f"--image-path={image.folder}"]
        try:
            self._tell(box, command, [], timeout, ended)
        except BaseException:
            image.folder.rmdir()
            raise

    def interrupt(self, box: Box, done: Callable[[int, str], None]) -> None:
        """SIGINT to the guest. Raises OSError."""
        self._tell(box, ["kill"], ["INT"], _KILL_SECONDS, done)

    def _tell(
        self,
        box: Box,
        command: list[str],
        arguments: list[str],
        timeout: float,
        done: Callable[[int, str], None],
    ) -> None:
        """Any other command; `done` hears its exit code and what it printed."""
        argv = [*self._command(box), *command, box.key, *arguments]
        reads, writes = os.pipe()
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

        def ended(code: int) -> None:
            os.set_blocking(reads, False)
            try:
                said = os.read(reads, 1 << 16)
            except BlockingIOError:
                said = b""
            os.close(reads)
            done(code, said.decode("utf-8", "replace").strip()[-_MOST_TEXT:])

        try:
            self.jobs.start(lambda: _become(argv, [null, null, writes], []), timeout, ended)
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
            os.close(null)


def _first_request(before: Allow | None, now: Allow | None) -> bytes:
    """Of a copy, which hears by it where its network is closed or opened."""
    changed = changed_variables(before, now, wires.PLACE)
    if not changed:
        return HEADER.pack(Op.PING, Status.OK, 0, 0, 0)
    meta, _ = encode({"variables": changed})
    return HEADER.pack(Op.ADOPT, Status.OK, 0, len(meta), 0) + meta


def _of_host(limits: Limits) -> Limits:
    """What a sandbox's control group is told."""
    pids = None if limits.pids is None else limits.pids * _HOST_PIDS_EACH + _HOST_PIDS
    memory = None if limits.memory_bytes is None else limits.memory_bytes + _KERNEL_BYTES
    return replace(limits, pids=pids, memory_bytes=memory)


def _become(argv: list[str], standard: list[int], join_fds: list[int]) -> None:
    """In a job's process."""
    for fd in join_fds:  # before runsc starts anything: all of it counts
        os.write(fd, b"0")
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
    os.execve(argv[0], argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"})
