"""Snapshots, as values: what one is, how often it is restored, when it goes."""

from __future__ import annotations

from typing import Any

import sandbox_gym
from sandbox_gym.errors import BudgetExceeded, SandboxDied, SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot
from sandbox_gym.testing.subject import Subject, check, expect, output, raises, value


@check("snapshot")
def memory_and_disk(subject: Subject) -> None:
    """A restored sandbox has the memory and disk of that moment; the source runs on, by itself."""
    box = subject.create()
    value(box, "x = [1]")
    box.write_file("kept", b"one")
    snapshot = subject.snapshot(box, label="here")
    value(box, "x.append(2)")
    box.write_file("kept", b"two")
    box.write_file("new", b"n")
    copy = subject.restore(snapshot)
    expect((value(copy, "x"), copy.read_file("kept")), ("[1]", b"one"), "the copy's state")
    with raises(FileNotFoundError, "a file that came later"):
        copy.read_file("new")
    expect((value(box, "x"), box.read_file("kept")), ("[1, 2]", b"two"), "the source's")
    assert copy.parent is snapshot and box.parent is snapshot and copy.id != box.id
    assert snapshot.label == "here" and snapshot.engine and isinstance(snapshot.why, str)
    assert snapshot.memory_bytes >= 0 and snapshot.disk_bytes >= 0


@check("snapshot")
def restored_many_times(subject: Subject) -> None:
    """It is restored at once and again, under names of one's own; each copy is sealed."""
    box = subject.create()
    value(box, "x = 1")
    snapshot = subject.snapshot(box)
    copies = [subject.own(copy) for copy in Sandbox.restore_many(snapshot, 2)]
    named = subject.restore(snapshot, name=f"copy-of-{box.id}")
    expect(named.name, f"copy-of-{box.id}", "name")
    for number, copy in enumerate([*copies, named]):
        expect(value(copy, f"x += {number}; x"), str(1 + number), "the state of each")
    expect(len({box.id, named.id, *(copy.id for copy in copies)}), 4, "ids")


@check("snapshot")
def outlives_its_source(subject: Subject) -> None:
    """It is restored when its source has ended; copies live on when it is deleted, and then it can't be restored."""
    box = subject.create()
    value(box, "x = 1")
    snapshot = subject.snapshot(box)
    box.terminate()
    copy = subject.restore(snapshot)
    snapshot.delete()
    snapshot.delete()
    expect(value(copy, "x"), "1", "the copy's state")
    assert snapshot.deleted and snapshot not in Snapshot.list()
    with raises(SnapshotError, "restoring what was deleted"):
        Sandbox.restore(snapshot)


@check("snapshot")
def of_copies(subject: Subject) -> None:
    """Copies are captured in turn, generation after generation."""
    box = subject.create()
    value(box, "x = 0")
    for generation in range(1, 4):
        output(box, f"echo {generation} >> log")
        value(box, "x += 1")
        snapshot = subject.snapshot(box)
        box.terminate()
        box = subject.restore(snapshot)
        expect(value(box, "x"), str(generation), "memory")
        expect(box.read_text("log").split(), [str(i + 1) for i in range(generation)], "disk")


@check("snapshot")
def freeze_ends_the_sandbox(subject: Subject) -> None:
    """A frozen sandbox is over, and its snapshot holds all of it."""
    box = subject.create()
    value(box, "x = 1")
    snapshot = box.freeze()
    subject.later(snapshot.delete)
    expect(box.status, "terminated", "status")
    with raises(SandboxDied, "a call after"):
        box.run_code("1")
    expect(value(subject.restore(snapshot), "x"), "1", "the copy's state")


@check("snapshot")
def saved_and_loaded(subject: Subject) -> None:
    """A snapshot is written to a file, and what is loaded from it is restored."""
    box, folder = subject.create(), subject.folder()
    value(box, "x = 1")
    box.write_file("kept", b"one")
    snapshot = subject.snapshot(box)
    snapshot.save(folder / "x.sbx")
    loaded = Snapshot.load(folder / "x.sbx", backend=subject.backend)
    subject.later(loaded.delete)
    copy = subject.restore(loaded)
    expect((value(copy, "x"), copy.read_file("kept")), ("1", b"one"), "the copy's state")


@check("snapshot")
def budget_is_kept(subject: Subject) -> None:
    """Over the budget of all sandboxes and snapshots none is made; with it lifted, one is."""
    box = subject.create()
    value(box, "x = b'x' * (8 << 20)")
    sandbox_gym.set_budget(memory=1, backend=subject.backend)
    try:
        with raises(BudgetExceeded, "a sandbox over the budget"):
            subject.create()
    finally:
        sandbox_gym.set_budget(backend=subject.backend)
    expect(value(subject.create(), "6 * 7"), "42", "another, once the budget is lifted")


@check("checkpoint")
def rewind_in_place(subject: Subject) -> None:
    """A sandbox goes back to a checkpoint, by its label or the latest, under its own id and name, again and again."""
    box = subject.create()
    value(box, "x = 'first'")
    box.checkpoint("one")
    value(box, "x = 'second'")
    box.write_file("kept", b"k")
    box.checkpoint("two")
    output(box, "rm kept")
    before: Any = box.id, box.name
    for label, wanted in ((None, "second"), ("one", "first"), ("two", "second")):
        value(box, "x = 'lost'")
        box.rewind(label)
        expect(value(box, "x"), repr(wanted), f"after rewind({label!r})")
    expect((box.id, box.name, box.status), (*before, "running"), "id, name, status")
    expect(box.read_file("kept"), b"k", "disk")
    with raises(KeyError, "a label that there is not"):
        box.rewind("three")


@check("checkpoint")
def rewind_brings_back_the_dead(subject: Subject) -> None:
    """A sandbox that has died goes on from its checkpoint."""
    box = subject.create()
    value(box, "x = 1")
    box.checkpoint()
    with raises(SandboxDied, "the end of the guest"):
        box.run_code("import os; os._exit(1)")
    box.rewind()
    expect((value(box, "x"), box.status), ("1", "running"), "after the rewind")
