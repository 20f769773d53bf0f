"""image= a folder that holds a root file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.sandbox import Sandbox


def test_a_folder_as_root_file_system(small_root: Path) -> None:
    with Sandbox.create(image=small_root, disk="64Mi") as box:
        assert box.run_code("import sys; 6 * 7").value == "42"
        assert box.read_text("/etc/motd") == "from the image\n"
        assert not box.shell("test -e /usr/bin/git || test -e /etc/ssl").ok
        assert box.shell("cat /etc/motd; id -u").stdout == "from the image\n0\n"
        box.run_code("x = 1")
        box.shell("echo changed > /etc/motd; cat /etc/motd > /usr/new")
        copies = box.fork(2)
        copies[0].write_file("/etc/motd", "again")
        assert copies[1].run_code("x, open('/etc/motd').read(), open('/usr/new').read()").value == str(
            (1, *["changed\n"] * 2)
        )
        for copy in copies:
            copy.terminate()
        with pytest.raises(FileNotFoundError):
            box.read_file(str(small_root / "etc/motd"))
    assert (small_root / "etc/motd").read_text() == "from the image\n" and not (
        small_root / "usr/new"
    ).exists()


def test_two_sandboxes_of_one_image_share_nothing(small_root: Path) -> None:
    with Sandbox.create(image=str(small_root)) as one, Sandbox.create(image=str(small_root)) as other:
        one.write_file("/etc/motd", "one")
        assert other.read_text("/etc/motd") == "from the image\n"


def test_a_link_to_the_folder_will_do(small_root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(small_root)
    with Sandbox.create(image=tmp_path / "link") as box:
        assert box.run_code("open('/etc/motd').read()").value == repr("from the image\n")


def test_links_in_the_image_are_read_as_the_sandbox_would(small_root: Path, tmp_path: Path) -> None:
    """A link to / in an image must not lead to the host's files."""
    (small_root / "evil").symlink_to("/root")
    (small_root / "etc/hosts").unlink(missing_ok=True)
    (small_root / "etc/hosts").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("host")
    try:
        with Sandbox.create(image=small_root) as box:
            assert box.shell("cat /etc/hosts").stdout != "host"
            box.shell("echo overwritten > /etc/hosts")
        assert (tmp_path / "victim").read_text() == "host"
    finally:
        os.unlink(small_root / "evil")
        os.unlink(small_root / "etc/hosts")


def test_a_folder_without_python_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="python3"):
        Sandbox.create(image=tmp_path)
    with pytest.raises(ValueError, match="folder"):
        Sandbox.create(image="./debian")
