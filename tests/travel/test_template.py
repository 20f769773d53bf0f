"""Templates: built once, started often, by several clients at once, and never half there."""

from __future__ import annotations

import copy
import fcntl
import os
import pickle
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sandbox_gym
from sandbox_gym import _store, cli
from sandbox_gym.backends import lookup
from sandbox_gym.errors import LimitExceeded, SandboxError, SandboxTimeout, SnapshotError
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.template import Template

from .conftest import Client, said

_LIMITS: dict[str, Any] = {"memory": "256Mi", "disk": "128Mi", "pids": 64}


def blobs(home: Path) -> set[str]:
    return set(os.listdir(home / "templates/blobs"))


def test_built_once_and_started_often(home: Path) -> None:
    assert Template.list() == [] and Template.prune(0) == []

    def warm(box: Sandbox) -> object:
        return box.run_code("import random; n = 41")

    built = Template.build("click-env", setup=["echo 1 > kept", warm], env={"COLOUR": "red"}, **_LIMITS)
    template = Template.get("click-env")
    assert template == built == pickle.loads(pickle.dumps(built)) == copy.deepcopy(built)
    assert Template.list() == [template] and sandbox_gym.Template is Template
    assert template.size_bytes == sum(file.stat().st_size for file in (home / "templates/blobs").iterdir())
    boxes = [Sandbox.create(f"box-{number}", image=template) for number in range(3)]
    for box in boxes:
        assert box.run_code("n += 1; import os; n, os.environ['COLOUR']").value == "(42, 'red')"
        assert box.shell("cat kept; echo 2 > kept").stdout == "1\n"
    assert [box.name for box in boxes] == ["box-0", "box-1", "box-2"]
    assert len({box.run_code("random.random()").value for box in boxes}) == 3  # like any that are made anew
    parent = boxes[0].parent
    assert parent is not None and parent.engine == "fork" and boxes[0]._spec.limits.memory_bytes == 256 << 20
    for box in boxes:
        box.terminate()
    template.delete()
    template.delete()
    assert blobs(home) == set() and Template.list() == []
    with pytest.raises(KeyError, match="click-env"):
        Sandbox.create(image=template)
    with pytest.raises(KeyError, match="there are none"):
        Template.get("click-env")


def test_a_start_takes_milliseconds() -> None:
    template = Template.build("quick", setup=[lambda box: box.run_code("import numpy")], **_LIMITS)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        with Sandbox.create(image=template) as box:
            assert box.run_code("numpy.ones(2).sum()").ok
            times.append(time.perf_counter() - start)
    print(f"first {times[0] * 1e3:.0f} ms, then p50 {statistics.median(times[1:]) * 1e3:.1f} ms")
    assert statistics.median(times[1:]) < 0.03  # 4 ms where nothing else runs


def test_what_fork_can_not_copy_is_restored_each_time() -> None:
    template = Template.build("tree", setup=["sleep 1000 >/dev/null 2>&1 & echo $! > pid"], **_LIMITS)
    for _ in range(2):
        with Sandbox.create(image=template) as box:
            assert box.shell("kill -0 $(cat pid)").ok
            assert box.parent is not None and box.parent.engine == "criu"


def test_other_limits(home: Path) -> None:
    template = Template.build("plain", setup=["echo 1 > kept"], **_LIMITS)
    box = Sandbox.create(image=template, memory="64Mi", disk="32Mi", ttl=60)
    with box, pytest.raises(LimitExceeded, match="67108864"):
        box.run_code("x = bytearray(100 << 20)")
    with Sandbox.create(image=template, disk="32Mi", pids=None) as box:
        assert not box.shell("head -c 64M /dev/zero > full").ok
        assert box._spec.limits.memory_bytes == 256 << 20 and box._spec.limits.pids is None
    with Sandbox.create(image=template, ttl=0.5) as box:
        time.sleep(0.8)
        with pytest.raises(SandboxError, match="time to live"):
            box.run_code("1")
    with pytest.raises(ValueError, match="build another"):
        Sandbox.create(image=template, env={"A": "b"})
    with pytest.raises(ValueError, match="above zero"):
        Sandbox.create(image=template, memory=0)
    with pytest.raises(ValueError, match="ttl"):
        Template.build("plain", ttl=5)


def test_one_on_top_of_another_shares_its_disk(home: Path) -> None:
    base = Template.build("base", setup=["head -c 2M /dev/urandom > large"], **_LIMITS)
    before = blobs(home)
    top = Template.build("top", image=base, setup=["echo top > small"])
    added = blobs(home) - before
    size = sum((home / "templates/blobs" / blob).stat().st_size for blob in added)
    assert before < blobs(home) and top.size_bytes - size > 2 << 20
    base.delete()
    assert added < blobs(home)
    with Sandbox.create(image=top) as box:
        assert box.shell("stat -c %s large; cat small").stdout == "2097152\ntop\n"


def test_pruning_keeps_what_was_used_last(home: Path) -> None:
    names = ["a", "b", "c"]
    for name in names:
        Template.build(name, setup=["head -c 1M /dev/urandom > large"], **_LIMITS)
    Sandbox.create(image=Template.get("a")).terminate()
    assert [t.name for t in sorted(Template.list(), key=lambda t: t.used)] == ["b", "c", "a"]
    assert Template.prune("1Gi") == []
    assert Template.prune(Template.get("a").size_bytes + (1 << 20)) == ["b", "c"]
    assert [t.name for t in Template.list()] == ["a"]
    assert sum((home / "templates/blobs" / blob).stat().st_size for blob in blobs(home)) < 4 << 20
    Sandbox.create(image=Template.get("a")).terminate()
    assert Template.prune(0) == ["a"] and blobs(home) == set()


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("echo why >&2; exit 3", r"step 2, 'echo why >&2; exit 3', ended with 3\nwhy"),
        (lambda box: box.run_code("1 / 0"), "ZeroDivisionError"),
        (lambda box: box.shell("sleep 9", timeout=0.2), "did not end in time"),
        (lambda box: box.read_file("/none"), "No such file"),
    ],
)
def test_a_step_that_fails_keeps_nothing(
    home: Path, step: str | Callable[[Sandbox], object], words: str, no_image_left: None
) -> None:
    with pytest.raises((SandboxError, OSError), match=words):
        Template.build("broken", setup=["true", step], **_LIMITS)
    assert Template.list() == [] and not home.exists()


def test_what_is_no_template() -> None:
    for name in ("", "../up", "a/b", ".hidden", "x" * 101):
        with pytest.raises(ValueError, match="name"):
            Template.build(name)
    with pytest.raises(ValueError, match="list of steps"):
        Template.build("x", setup="true")
    with pytest.raises(ValueError, match="3"):
        Template.build("x", setup=[3])  # type: ignore[list-item]


def test_a_damaged_one_is_refused_and_can_be_built_again(home: Path, no_image_left: None) -> None:
    def build() -> Template:
        return Template.build("x", setup=["echo 1 > kept"], **_LIMITS)

    template = build()
    for number in range(len(blobs(home))):
        path = home / "templates/blobs" / sorted(blobs(home))[number]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=r"template x: its part .* build it again"):
            Sandbox.create(image=template)
        path.write_bytes(content[:-1])
        with pytest.raises(SnapshotError, match="not what was written"):
            Sandbox.create(image=template)
        path.unlink()
        with pytest.raises(SnapshotError, match="missing"):
            Sandbox.create(image=template)
        build()
    name = home / "templates/names/x.json"
    name.write_bytes(name.read_bytes().replace(b'"created"', b'"Created"'))
    with pytest.raises(SnapshotError, match="manifest"):
        Sandbox.create(image=template)
    with pytest.raises(SnapshotError, match="manifest"):
        template.size_bytes  # noqa: B018
    build()
    Sandbox.create(image=template).terminate()


def test_another_user_s_store_is_refused(home: Path) -> None:
    template = Template.build("x", **_LIMITS)
    os.chmod(home / "templates", 0o770)
    for call in (lambda: Sandbox.create(image=template), lambda: Template.get("x"), template.delete):
        with pytest.raises(SandboxError, match="another user"):
            call()
    os.chmod(home / "templates", 0o700)
    os.chown(home / "templates", 12345, 0)
    with pytest.raises(SandboxError, match="another user"):
        Template.build("y", **_LIMITS)


def test_what_was_ready_and_died_is_loaded_again(no_image_left: None) -> None:
    template = Template.build("x", setup=["echo 1 > kept"], **_LIMITS)
    with Sandbox.create(image=template) as box:
        parent = box.parent
    assert parent is not None
    (row,) = [row for row in lookup.get("native").list() if row["id"] == parent.id]
    _kill_in_supervisor(row["pid"])
    with Sandbox.create(image=template) as box:
        assert box.shell("cat kept").stdout == "1\n" and box.parent is not parent


def _kill_in_supervisor(pid: int) -> None:
    """By the number that the supervisor's pid namespace gives it."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/status").read_text()
            except OSError:
                continue
            line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            numbers = line.split()[1:]
            if len(numbers) > 2 and numbers[1] == str(pid) and _ours(int(entry)):
                os.kill(int(entry), signal.SIGKILL)
                return
    raise AssertionError(f"no process {pid}")


def _ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


# ---- several at once ------------------------------------------------------------------------------------------------


def test_two_clients_start_from_one_at_once(client: Client) -> None:
    Template.build("shared", setup=["echo 1 > kept", lambda box: box.run_code("n = 1")], **_LIMITS)
    code = """
who = %r
boxes = [sg.Sandbox.create(image=sg.Template.get("shared")) for _ in range(4)]
for box in boxes:
    box.run_code(f"n += 1; who = {who!r}"); box.shell(f"echo {who} >> kept")
    time.sleep(0.02)
print([box.run_code("n, who").value for box in boxes], boxes[3].read_text("kept").split())
"""
    clients = [client(code % who) for who in ("one", "two")]
    for who, process in zip(("one", "two"), clients):
        assert said(process) == f"{[str((2, who))] * 4} {['1', who]}"


def test_threads_load_one_once(no_image_left: None) -> None:
    template = Template.build("x", **_LIMITS)
    boxes: list[Sandbox] = []
    threads = [
        threading.Thread(target=lambda: boxes.append(Sandbox.create(image=template))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(boxes) == 4 and len({box.parent for box in boxes}) == 1
    for box in boxes:
        box.terminate()


def test_one_name_is_built_twice_at_once(client: Client, home: Path) -> None:
    code = """
t = sg.Template.build("same", setup=["head -c 1M /dev/urandom > large; echo %s > who"], memory="256Mi")
box = sg.Sandbox.create(image=t)
print(box.read_text("who"), box.shell("stat -c %%s large").stdout)
"""
    clients = [client(code % who) for who in ("one", "two")]
    for process in clients:
        who, size = said(process).split()
        assert who in ("one", "two") and size == "1048576"
    template = Template.get("same")
    assert (
        sum((home / "templates/blobs" / blob).stat().st_size for blob in blobs(home)) == template.size_bytes
    )
    with Sandbox.create(image=template) as box:
        assert box.read_text("who").strip() in ("one", "two")


def test_a_lock_that_nobody_gives_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template.build("x", **_LIMITS)
    monkeypatch.setattr(_store, "_LOCK_TIMEOUT", 0.1)
    with open(home / "templates/lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = blobs(home)
        for call in (
            lambda: Sandbox.create(image=template),
            lambda: Template.build("y", **_LIMITS),
            template.delete,
            lambda: Template.prune(0),
        ):
            with pytest.raises(SandboxTimeout, match="lock"):
                call()
        assert blobs(home) == before and Template.list() == [template]
    assert Template.prune(0) == ["x"]


def test_built_anew_under_the_feet_of_who_uses_it() -> None:
    template = Template.build("x", setup=["echo old > kept"], **_LIMITS)
    with Sandbox.create(image=template) as old:
        Template.build("x", setup=["echo new > kept"], **_LIMITS)
        with Sandbox.create(image=template) as new:
            assert (old.read_text("kept"), new.read_text("kept")) == ("old\n", "new\n")


def test_a_builder_that_is_killed_leaves_nothing(client: Client, home: Path) -> None:
    Template.build("old", setup=["echo 1 > kept"], **_LIMITS)
    before = blobs(home)
    process = client(
        """
def fill(box):
    box.run_code("import os; large = os.urandom(100 << 20)"); print("go", flush=True)
sg.Template.build("old", setup=[fill])
"""
    )
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    deadline = time.monotonic() + 30
    while not _writes(process.pid, home / "templates/blobs"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert blobs(home) == before and os.listdir(home / "templates/names") == ["old.json"]
    with Sandbox.create(image=Template.get("old")) as box:
        assert box.read_text("kept") == "1\n"


def _writes(pid: int, folder: Path) -> bool:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith(f"{folder}/") and fd.stat().st_size >= 1 << 20:
                return True
        except OSError:
            continue
    return False


def test_unfinished_files_of_old_are_cleared(home: Path) -> None:
    Template.build("x", **_LIMITS)
    for name, age in (("old", 2 * 86400), ("young", 10)):
        draft = home / f"templates/blobs/.{name}.part"
        draft.touch()
        os.utime(draft, (time.time() - age,) * 2)
    Template.prune("1Gi")
    assert {name for name in blobs(home) if name.startswith(".")} == {".young.part"}


def test_the_command_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["template", "list"]) == 0 and capsys.readouterr().out == "No templates are kept.\n"
    assert cli.main(["template", "build", "some", "--setup", "echo 1 > a", "--setup", "cat a"]) == 0
    told = capsys.readouterr().out
    assert re.fullmatch(r"built some, \d+\.\d MiB\n", told)
    assert cli.main(["template", "build", "some"]) == 0
    assert re.fullmatch(r"built some, .* MiB, in place of an older one\n", capsys.readouterr().out)
    assert cli.main(["template", "list"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "USED"] and row.split()[0] == "some" and row.endswith("s ago")
    for wrong in (["delete", "none"], ["build", "no", "--setup", "false"], ["prune", "much"]):
        assert cli.main(["template", *wrong]) == 1 and len(capsys.readouterr().err) > 10
    (home / "templates/names/some.json").write_text("{}")
    assert cli.main(["template", "list"]) == 0 and "damaged" in capsys.readouterr().out
    assert cli.main(["template", "prune", "0"]) == 1 and "above zero" in capsys.readouterr().err
    assert cli.main(["template", "build", "some"]) == 0
    assert capsys.readouterr().out.startswith("built some, ")
    assert cli.main(["template", "prune", "10"]) == 0 and capsys.readouterr().out == "deleted some\n"
    assert cli.main(["template", "build", "some"]) == 0 and cli.main(["template", "delete", "some"]) == 0
    assert Template.list() == []


def test_progress_is_shown_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Template.build("quiet", setup=["true"], **_LIMITS)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Template.build("loud", setup=["true"], **_LIMITS)
    assert "step 1 of 1: 'true'" in capsys.readouterr().err
