"""Whoever is killed, whenever: nothing hangs, nothing stays, and the error says what became of what."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from sandbox_gym.backends.docker import owners
from sandbox_gym.backends.docker.daemon import Daemon
from sandbox_gym.backends.docker.owners import OWNER, Owner
from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.sandbox import Sandbox
from tests import dockerd
from tests.docker.conftest import Client, a_folder, backend, end_backends, held, until, using
from tests.dockerd import Dockerd

_BUSY = """
box = Sandbox.create(backend="docker")
snapshot = box.snapshot()
copy = Sandbox.restore(snapshot)
copy.start(["sleep", "1000"])
print(box._backend._owner.run, box._backend._keeper._process.pid, flush=True)
sys.stdin.read()
"""


def started(client: Client) -> tuple[subprocess.Popen[str], str, int]:
    """A client with two sandboxes and a snapshot, its run, and its keeper's pid."""
    process = client(_BUSY)
    assert process.stdout is not None
    run, keeper = process.stdout.readline().split()
    assert len(held(Daemon(), f"{owners.RUN}={run}")) >= 4
    return process, run, int(keeper)


def lives(pid: int) -> bool:
    return registry.start_time(pid) is not None


def is_gone(run: str) -> bool:
    return not held(Daemon(), f"{owners.RUN}={run}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_is_killed_leaves_nothing(client: Client, number: int) -> None:
    process, run, keeper = started(client)
    process.send_signal(number)
    process.wait()
    until(lambda: is_gone(run))
    until(lambda: not lives(keeper))


def test_a_client_that_ends(client: Client) -> None:
    process, run, _ = started(client)
    process.communicate("")
    until(lambda: is_gone(run))


def test_client_and_keeper_killed_at_once(client: Client) -> None:
    """Guests end with their input and are removed by the daemon; the rest by whoever comes next."""
    process, run, keeper = started(client)
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    process.wait()
    until(
        lambda: not [row for row in Daemon().containers(f"{owners.RUN}={run}") if row["State"] == "running"]
    )
    assert not is_gone(run)  # the snapshot
    told = owners.collect_all(dry_run=True)
    assert told and not is_gone(run)
    assert owners.collect_all(dry_run=False) == told
    assert is_gone(run)


def test_the_next_client_sweeps(client: Client) -> None:
    process, run, keeper = started(client)
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    process.wait()
    end_backends()
    assert backend().alive()
    until(lambda: is_gone(run))


def test_living_owners_are_left_alone(client: Client) -> None:
    process, run, _ = started(client)
    before = held(Daemon(), f"{owners.RUN}={run}")
    assert owners.collect_all(dry_run=False) == []
    assert held(Daemon(), f"{owners.RUN}={run}") == before
    process.communicate("")
    until(lambda: is_gone(run))


def test_volumes_and_networks_go_by_their_labels(daemon: Dockerd) -> None:
    labels = backend()._owner.labels("network")
    there = Daemon()
    there.ask("POST", "/volumes/create", body={"Name": "kept", "Labels": labels})
    there.ask("POST", "/volumes/create", body={"Name": "another's"[:7], "Labels": {"a": "b"}})
    end_backends()
    assert [row["Name"] for row in there.ask("GET", "/volumes")["Volumes"]] == ["another"]
    there.ask("DELETE", "/volumes/another")


def test_who_is_dead() -> None:
    this = Owner.this()
    assert Owner.of(this.labels("sandbox")) == this and not this.is_dead()
    assert Owner(this.boot, this.namespace, this.pid, this.start + 1, "x").is_dead()
    assert Owner("another", this.namespace, this.pid, this.start, "x").is_dead()
    assert not Owner(this.boot, this.namespace + 1, 1 << 22, 1, "x").is_dead()
    assert Owner.of({OWNER: "made/up"}) is None and Owner.of({}) is None


def test_a_keeper_that_is_killed(box: Sandbox) -> None:
    made = backend()
    os.kill(made._keeper._process.pid, signal.SIGKILL)
    until(lambda: not made.alive())
    with pytest.raises(SandboxDied, match="keeper"):
        made.create(box._spec, name=None, timeout=10)
    with Sandbox.create(backend="docker", disk=None) as other:  # by another backend, with another keeper
        assert other.run_code("1").ok
        assert backend() is not made
    assert held(Daemon(), f"{owners.RUN}={made._owner.run}") == set()


def test_a_guest_that_is_killed(box: Sandbox) -> None:
    pid = next(row["pid"] for row in backend().list() if row["id"] == box.id)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxDied, match="exit code 137"):
        box.run_code("1")
    assert box.status == "dead"


def test_a_guest_that_closes_its_output_and_lives(box: Sandbox) -> None:
    """Nothing tells of that: its call ends by the time-out, and the sandbox with it."""
    result = box.run_code("import os\nos.closerange(3, 1000)\nwhile True: pass", timeout=0.5)
    assert result.timed_out and box.status == "dead"
    until(lambda: not backend()._daemon.containers(f"sandbox-gym.id={box.id}"))


def test_a_hung_guest(box: Sandbox) -> None:
    hang = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass"
    start = time.monotonic()
    result = box.run_code(hang, timeout=0.5)
    assert result.timed_out and box.status == "dead"
    assert time.monotonic() - start < 15
    assert not backend()._daemon.containers(f"sandbox-gym.id={box.id}")


def test_terminate_ends_a_call_under_way(box: Sandbox) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            box.shell("sleep 1000", timeout=900)
        except SandboxError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: backend().usage(box.id)["children"] > 0)
    box.terminate()
    thread.join(timeout=20)
    assert not thread.is_alive() and isinstance(raised[0], SandboxDied)


def test_a_daemon_that_is_killed_during_a_call() -> None:
    with a_folder() as folder, dockerd.started(folder) as mine, using(mine):
        box = Sandbox.create(backend="docker", disk=None)
        timer = threading.Timer(0.5, mine.kill)
        timer.start()
        with pytest.raises(SandboxError, match="gone"):
            box.shell("sleep 30", timeout=60)
        timer.join()
        assert box.status == "dead"
        box.terminate()
        with pytest.raises(BackendUnavailable, match="systemctl start docker"):
            Sandbox.create(backend="docker", disk=None)


def test_a_daemon_that_does_not_answer() -> None:
    """Stopped, it takes connections and says nothing."""
    with a_folder() as folder, dockerd.started(folder) as mine, using(mine):
        there = Daemon()
        mine.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(SandboxTimeout, match=r"within 0\.5 s"):
                there.ask("GET", "/info", timeout=0.5)
            with pytest.raises(SandboxTimeout, match=r"within 0\.5 s"):
                there.attach("any", timeout=0.5)
        finally:
            mine.process.send_signal(signal.SIGCONT)


def test_a_daemon_leaves_no_trace_when_it_ends() -> None:
    with a_folder() as folder:
        with dockerd.started(folder) as mine, using(mine):
            Sandbox.create(backend="docker", disk=None)
            pids = dockerd._processes(mine)
            assert len(pids) >= 2 and dockerd._groups(mine)
            mine.kill()
        assert dockerd._groups(mine) == []
        assert str(folder) not in Path("/proc/self/mounts").read_text()
        assert not [pid for pid in pids if lives(pid)]
