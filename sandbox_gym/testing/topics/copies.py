"""Forks: running copies, sealed from each other; and the chance that they draw from."""

from __future__ import annotations

from sandbox_gym.testing.subject import Subject, check, expect, output, running, value

_DRAW = "import random; [random.random() for _ in range(3)]"


@check("fork")
def siblings_are_sealed(subject: Subject) -> None:
    """Copies have names of one prefix; what one does to memory, disk and processes neither origin nor siblings see."""
    box = subject.create()
    value(box, "x = []")
    box.write_file("shared", b"origin")
    first, second = subject.fork(box, 2, prefix=f"{box.id}-")
    expect([copy.name for copy in (first, second)], [f"{box.id}-1", f"{box.id}-2"], "names")
    assert first.parent is second.parent is box.parent is not None
    value(first, "x.append(1)")
    first.write_file("shared", b"first")
    first.write_file("/tmp/only", b"f")
    first.start(["sleep", "98770"])
    for other in (box, second):
        expect((value(other, "x"), other.read_file("shared")), ("[]", b"origin"), "the others' state")
        expect(value(other, "import os; os.path.exists('/tmp/only')"), "False", "a new file")
        expect(running(other, "sleep 98770"), 0, "its process")
    box.terminate()
    second.terminate()
    expect(
        (value(first, "x"), first.read_file("shared")), ("[1]", b"first"), "its own, when the others are gone"
    )


@check("fork")
def of_forks(subject: Subject) -> None:
    """Copies are forked in turn; a copy's own writes come along."""
    box = subject.create()
    value(box, "x = 1")
    (child,) = subject.fork(box)
    output(child, "echo child > who")
    value(child, "x = 2")
    (grandchild,) = subject.fork(child)
    child.terminate()
    expect((value(grandchild, "x"), grandchild.read_text("who")), ("2", "child\n"), "the grandchild's state")
    expect(value(box, "x"), "1", "the first one's")


@check("rng")
def same_goes_on(subject: Subject) -> None:
    """By default copies draw the random numbers that their origin draws."""
    box = subject.create()
    value(box, "import random; random.seed()")
    (copy,) = subject.fork(box)
    expect(value(copy, _DRAW), value(box, _DRAW), "numbers")


@check("rng")
def diverge_and_seeds(subject: Subject) -> None:
    """With rng="diverge" each copy draws its own numbers, with a seed those of that seed."""
    box = subject.create()
    value(box, "import random; random.seed(1)")
    snapshot = subject.snapshot(box)
    ways = ("diverge", "diverge", 5, 5)
    drawn = [value(subject.restore(snapshot, rng=how), _DRAW) for how in ways]
    drawn.append(value(box, _DRAW))
    expect(drawn[2], drawn[3], "numbers of one seed")
    expect(len(set(drawn)), 4, f"different ones among {drawn}")
