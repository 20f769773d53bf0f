"""Making sandboxes: what a fresh one is."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sandbox_gym.backends import lookup
from sandbox_gym.errors import SandboxError, SandboxTimeout
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.testing.subject import Subject, check, expect, output, raises, value

# Of these a guest may have its own, and the same by chance.
_COMMON = {
    "HOME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "LOGNAME",
    "PATH",
    "PWD",
    "SHELL",
    "SHLVL",
    "TERM",
    "TZ",
}


@check("create")
def runs_and_is_listed(subject: Subject) -> None:
    """A fresh sandbox answers, and is found by its id and name until it ends."""
    with subject.create() as box:
        expect(value(box, "6 * 7"), "42", "a cell's value")
        expect(box.status, "running", "status")
        assert box in Sandbox.list() and Sandbox.get(box.id) is Sandbox.get(box.name) is box
        assert box.id in {row["id"] for row in lookup.get(subject.backend).list()}, "the backend lists it"
        assert box.parent is None
    expect(box.status, "terminated", "status after the context ended")
    assert box not in Sandbox.list()
    assert box.id not in {row["id"] for row in lookup.get(subject.backend).list()}, "it is listed no more"


@check("create")
def names_are_unique(subject: Subject) -> None:
    """A name is one living sandbox's alone, and free again when that has ended."""
    name = f"check-{secrets.token_hex(4)}"
    first = subject.create(name)
    expect(first.name, name, "name")
    with raises(SandboxError, "a second sandbox of that name"):
        subject.create(name)
    first.terminate()
    assert subject.create(name).id != first.id


@check("create")
def several_at_once(subject: Subject) -> None:
    """Threads make sandboxes at the same time."""
    with ThreadPoolExecutor(4) as pool:
        boxes = list(pool.map(lambda _: subject.create(), range(4)))
        answers = list(pool.map(lambda i: value(boxes[i], f"{i} * 2"), range(4)))
    expect(answers, ["0", "2", "4", "6"], "what each says")
    expect(len({box.id for box in boxes}), 4, "ids")


@check("create")
def times_out(subject: Subject) -> None:
    """What can't be made within its time is SandboxTimeout, and nothing of it stays."""
    with raises(SandboxTimeout, "a sandbox in a hundredth of a millisecond"):
        subject.create(timeout=0.00001)


@check("create")
def environment_is_given(subject: Subject) -> None:
    """Programs have the variables of env=, and none of this process's."""
    secret = secrets.token_hex(8)
    os.environ["SANDBOX_GYM_CHECK"] = secret
    try:
        box = subject.create(env={"GIVEN": "a b=c", "EMPTY": ""})
    finally:
        del os.environ["SANDBOX_GYM_CHECK"]
    expect(value(box, "import os; os.environ['GIVEN'], os.environ['EMPTY']"), "('a b=c', '')", "in a cell")
    expect(output(box, 'printf %s "$GIVEN"'), "a b=c", "in a command")
    (copy,) = subject.fork(box)
    expect(output(copy, 'printf %s "$GIVEN"'), "a b=c", "in a copy")
    everything = value(box, "open('/proc/self/environ').read() + repr(os.environ)") or ""
    everything += output(box, "env")
    host = {key: text for key, text in os.environ.items() if key not in _COMMON and len(text) > 7}
    found = [
        key
        for key, text in host.items()
        if f"{key}={text}" in everything or f"{key!r}: {text!r}" in everything
    ]
    assert secret not in everything and not found, f"variables of the host inside: {found}"


@check("create")
def work_folder(subject: Subject) -> None:
    """Cells and commands start in /workspace, which can be written to."""
    box = subject.create()
    expect(value(box, "import os; os.getcwd()"), "'/workspace'", "a cell's folder")
    expect(output(box, "pwd; echo text > here; cat here"), "/workspace\ntext\n", "a command's")
    box.write_file("beside", b"x")
    expect(value(box, "sorted(os.listdir())"), "['beside', 'here']", "what is in it")


@check("create")
def mounts_are_read_only(subject: Subject) -> None:
    """Folders and files of mounts= are seen where they are said to be, in copies too, and can't be changed."""
    folder, file = subject.folder(), subject.folder() / "data"
    (folder / "data").write_text("given")
    (folder / "deep").mkdir()
    file.write_text("given")
    _only_read(subject, folder, file)


@check("create")
def mounts_within_mounts(subject: Subject) -> None:
    """The same, where one lies within another."""
    folder = subject.folder()
    (folder / "data").write_text("given")
    (folder / "deep").mkdir()
    _only_read(subject, folder, folder / "data")


def _only_read(subject: Subject, folder: Path, file: Path) -> None:
    box = subject.create(mounts=[(folder, "/mnt/all"), (file, "/mnt/one")])
    copies = subject.fork(box, 2)
    for sandbox in (box, *copies, *subject.fork(copies[0])):
        expect(sandbox.read_text("/mnt/all/data") + sandbox.read_text("/mnt/one"), "givengiven", "read")
        for command in (
            "echo x > /mnt/all/data",
            "echo x > /mnt/one",
            "rm /mnt/all/data",
            "touch /mnt/all/deep/x",
        ):
            assert not sandbox.shell(command).ok, f"{command} was allowed"
    expect((folder / "data").read_text() + file.read_text(), "givengiven", "the host's files")
    assert not any((folder / "deep").iterdir())
