"""Files between host and sandbox."""

from __future__ import annotations

import os
import secrets

from sandbox_gym.errors import LimitExceeded, ProtocolError
from sandbox_gym.testing.subject import Subject, check, expect, output, raises, value


@check("files")
def read_and_write(subject: Subject) -> None:
    """Bytes and text go in and out as they are, large ones too; folders on the way are made, modes kept."""
    box = subject.create()
    for data in (b"", bytes(range(256)), secrets.token_bytes(1 << 20) * 9):
        box.write_file("/tmp/a/b/c", data)
        assert box.read_file("/tmp/a/b/c") == data, f"{len(data)} bytes came back otherwise"
    box.write_file("script", "#!/bin/sh\necho ä\n", mode=0o755)
    expect(output(box, "./script"), "ä\n", "a script")
    expect(box.read_text("script"), "#!/bin/sh\necho ä\n", "text")
    with raises(LimitExceeded, "a file over max_bytes"):
        box.read_file("/tmp/a/b/c", max_bytes=1000)


@check("files")
def errors_are_oserrors(subject: Subject) -> None:
    """What can't be read or written is the same OSError as on the host."""
    box = subject.create()
    box.write_file("f", b"")
    with raises(FileNotFoundError, "reading what is not there"):
        box.read_file("/no/such")
    with raises(IsADirectoryError, "reading a folder"):
        box.read_file("/tmp")
    with raises(NotADirectoryError, "listing a file"):
        box.list_files("f")
    expect(value(box, "1"), "1", "a cell after")


@check("files")
def list_folders(subject: Subject) -> None:
    """Entries have kind, size and mode; links are told, not followed."""
    box = subject.create()
    output(box, "mkdir -p d/e; printf abc > d/f; chmod 640 d/f; ln -s f d/l; mkfifo d/p; printf x > d/e/g")
    rows = {row.path.rpartition("/")[2]: row for row in box.list_files("d")}
    kinds = {name: row.kind for name, row in rows.items()}
    expect(kinds, {"e": "dir", "f": "file", "l": "link", "p": "other"}, "kinds")
    expect((rows["f"].size, rows["f"].mode & 0o777), (3, 0o640), "size and mode")
    assert any(row.path.endswith("g") for row in box.list_files("d", recursive=True))


@check("files")
def trees_both_ways(subject: Subject) -> None:
    """Folders are uploaded and downloaded with their files, modes and inner links."""
    box, folder = subject.create(), subject.folder()
    source = folder / "in"
    (source / "sub").mkdir(parents=True)
    (source / "sub/run").write_bytes(b"x" * 100_000)
    (source / "sub/run").chmod(0o750)
    (source / "link").symlink_to("sub/run")
    box.upload(source, "/tmp/there")
    expect(
        output(box, "cd /tmp/there; wc -c < link; stat -c %a sub/run").split(), ["100000", "750"], "uploaded"
    )
    output(box, "printf more > /tmp/there/sub/new")
    box.download("/tmp/there", folder / "out")
    expect((folder / "out/sub/new").read_text(), "more", "a file from inside")
    expect(os.readlink(folder / "out/link"), "sub/run", "a link")
    expect((folder / "out/link").read_bytes(), b"x" * 100_000, "what it leads to")


@check("files")
def downloads_stay_below(subject: Subject) -> None:
    """Links that leave the tree, and devices or pipes in it, are refused, and nothing is written elsewhere."""
    box, folder = subject.create(), subject.folder()
    for number, trick in enumerate(("ln -s /etc/passwd d/x", "ln -s ../../up d/x", "mkfifo d/x")):
        output(box, f"rm -rf d; mkdir d; {trick}")
        with raises(ProtocolError, trick):
            box.download("d", folder / str(number))
    expect(os.listdir(folder), [], "what was written")
    expect(value(box, "1"), "1", "a cell after")
