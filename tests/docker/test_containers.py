"""What a container is, as seen inside and by the daemon: confinement, limits, labels, and how it ends."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path

import pytest

from sandbox_gym.backends.docker.owners import ID, KIND, NAME, OWNER, RUN
from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import BackendUnavailable, LimitExceeded, SandboxDied, SandboxError
from sandbox_gym.sandbox import Sandbox
from tests.docker.conftest import backend, until
from tests.dockerd import Dockerd

_CAPABILITIES = 0x4FB  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE


def test_confinement_as_seen_inside(box: Sandbox) -> None:
    status = dict(
        line.split(":\t", 1) for line in box.read_text("/proc/self/status").splitlines() if ":\t" in line
    )
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == _CAPABILITIES
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert box.run_code("import os; os.getpid()").value == "1"
    assert box.run_code("os.listdir('/sys/class/net')").value == "['lo']"
    assert box.read_text("/etc/resolv.conf").strip() == "nameserver 127.0.0.1"


@pytest.mark.parametrize(
    "attempt",
    [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /usr",
        "touch /usr/planted",
        "echo 1 > /proc/sys/kernel/panic",
        "mknod /tmp/disk b 8 0",
        "mknod /tmp/null c 1 3",
        "unshare --mount true",
        "chroot / true",
        "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
        "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
        "cat /proc/kcore",
        "echo c > /proc/sysrq-trigger",
        "dmesg --clear",
        "sethostname=x; hostname other",
        "date -s 2000-01-01",
    ],
)
def test_refused_inside(box: Sandbox, attempt: str) -> None:
    result = box.shell(attempt)
    assert result.exit_code not in (0, 127), result


def test_host_files_and_environment_stay_out(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    with Sandbox.create(backend="docker", env={"MINE": "1"}, disk=None) as other:
        seen = other.shell("env; cat /proc/1/environ").stdout
        assert "MINE=1" in seen and "hidden" not in seen
    assert not box.shell("ls /root/.ssh /etc/shadow /etc/docker").ok
    assert box.shell("echo x > /workspace/f && echo x > /tmp/f && echo x > /root/f").ok


def test_a_mount_is_read_only(daemon: Dockerd, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("from the host")
    with Sandbox.create(backend="docker", mounts=[(str(tmp_path), "/data")], disk=None) as box:
        assert box.read_text("/data/f") == "from the host"
        assert not box.shell("echo x > /data/f").ok
    assert (tmp_path / "f").read_text() == "from the host"


def test_labels_tell_owner_and_run(box: Sandbox) -> None:
    (row,) = backend()._daemon.containers(f"{ID}={box.id}")
    labels = row["Labels"]
    assert labels[OWNER].split("/")[2] == str(os.getpid())
    assert labels[RUN] == backend()._owner.run
    assert (labels[KIND], labels[NAME]) == ("sandbox", box.name)
    settings = backend()._daemon.inspect(row["Id"])["HostConfig"]
    assert settings["AutoRemove"] and settings["NetworkMode"] == "none" and not settings["Privileged"]
    assert settings["Memory"] == settings["MemorySwap"] == 512 << 20


def test_limits(box: Sandbox) -> None:
    killed = box.shell("python3 -c 'x = bytearray(1 << 30)'")
    assert (killed.exit_code, killed.limit) == (137, "memory")
    assert box.run_code("1").ok
    many = box.run_code(
        "import subprocess\nfor _ in range(100): subprocess.Popen(['sleep', '9'])", timeout=60
    )
    assert many.error is not None and many.error.type == "BlockingIOError"


def test_a_guest_over_its_memory_is_named_so(box: Sandbox) -> None:
    with pytest.raises(LimitExceeded, match=f"memory: its limit of {512 << 20} bytes"):
        box.run_code("x = bytearray(1 << 30)")
    assert box.status == "dead"


def test_too_little_memory_to_begin(daemon: Dockerd) -> None:
    with pytest.raises(BackendUnavailable, match=r"too small|[Mm]inimum memory"):
        Sandbox.create(backend="docker", memory="7Mi", disk=None)


def test_a_disk_limit_that_was_asked_for_is_an_error(daemon: Dockerd) -> None:
    with pytest.raises(BackendUnavailable, match=r"disk can't be enforced .* overlay2.* disk=None"):
        Sandbox.create(backend="docker", disk="1Gi")


def test_a_default_one_is_a_warning_once(client: object, daemon: Dockerd) -> None:
    process = client(  # type: ignore[operator]
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        Sandbox.create(backend='docker').terminate()\n"
        "print([str(one.message).split(':')[0] + one.filename for one in said])"
    )
    out, _ = process.communicate(timeout=60)
    assert out.strip() == "['default limits not enforced by this docker daemon<string>']"


def test_the_cap(client: object, daemon: Dockerd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_GYM_MAX_SANDBOXES", "1")
    process = client(  # type: ignore[operator]
        "from sandbox_gym.errors import LimitExceeded\n"
        "box = Sandbox.create(backend='docker')\n"
        "try: Sandbox.create(backend='docker')\n"
        "except LimitExceeded as error: print(error)\n"
        "box.terminate(); Sandbox.create(backend='docker'); print('again')"
    )
    out, _ = process.communicate(timeout=60)
    assert "the cap of 1" in out and out.endswith("again\n")


def test_names_are_unique(box: Sandbox) -> None:
    with pytest.raises(SandboxError, match="lives already"):
        Sandbox.create(box.name, backend="docker", disk=None)


def test_time_to_live(daemon: Dockerd) -> None:
    box = Sandbox.create(backend="docker", ttl=1.0, disk=None)
    until(lambda: not any(row["id"] == box.id for row in backend().list()))
    with pytest.raises(SandboxDied, match="time to live"):
        box.run_code("1")


def test_a_cell_is_interrupted(box: Sandbox) -> None:
    result = box.run_code("import time\ntry:\n    time.sleep(60)\nfinally:\n    left = 1", timeout=0.5)
    assert result.timed_out and box.run_code("left").value == "1"


def test_ten_megabytes_both_ways(box: Sandbox) -> None:
    block = os.urandom(10_000_000)
    box.write_file("/tmp/f", block)
    assert box.read_file("/tmp/f") == block
    result = box.shell("head -c 10000000 /dev/zero | tr '\\0' x")
    assert len(result.stdout) + result.stdout_cut == 10_000_000


def test_what_programs_print_never_comes_in_between(box: Sandbox) -> None:
    assert box.run_code("import os; [os.write(fd, b'x' * 100) for fd in (1, 2)]").ok
    assert box.shell("echo hello > /proc/1/fd/1; echo hello").stdout == "hello\n"
    assert box.run_code("6 * 7").value == "42"


def test_terminate_is_idempotent_and_leaves_no_process(box: Sandbox) -> None:
    box.start(["sleep", "1000"])
    pid = next(row["pid"] for row in backend().list() if row["id"] == box.id)
    box.terminate()
    assert registry.start_time(pid) is None
    box.terminate()
    backend().terminate(box._live)
    assert backend().death(box._live) == "it was terminated"


def test_usage(box: Sandbox) -> None:
    box.write_file("/workspace/f", bytes(1 << 20))
    box.start(["sleep", "1000"])
    used = backend().usage(box.id)
    assert used["memory_bytes"] > 5 << 20 and used["disk_bytes"] >= 1 << 20
    assert (used["children"], used["oom_kills"]) == (1, 0)


def test_a_budget_can_not_be_kept(daemon: Dockerd) -> None:
    with pytest.raises(BackendUnavailable, match="memory="):
        backend().set_budget(memory=1, disk=None)
    backend().set_budget(memory=None, disk=None)


def test_an_unknown_runtime_is_named(daemon: Dockerd) -> None:
    from sandbox_gym.backends.docker.client import DockerBackend

    with pytest.raises(BackendUnavailable, match=r"no runtime 'other', but .*runc"):
        DockerBackend("other")


def test_a_daemon_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sandbox_gym.backends.docker.daemon import Daemon

    with pytest.raises(BackendUnavailable, match="unset it"):
        Daemon("tcp://127.0.0.1:1")
    with pytest.raises(BackendUnavailable, match=re.escape("systemctl start docker")):
        Daemon("unix:///nonexistent/socket")


def test_idle_ends(daemon: Dockerd) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        box = Sandbox.create(backend="docker", idle_timeout=0.3)
    deadline = time.monotonic() + 20
    until(lambda: box.status == "dead" or time.monotonic() > deadline)
    assert box.status == "dead"
