"""Whatever a guest holds: the right engine takes it, and it goes on in the source and in each copy."""

from __future__ import annotations

import pytest

from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Sandbox
from tests.kinds.catalogue import KINDS
from tests.kinds.kind import PRELUDE, Kind

pytestmark = pytest.mark.usefixtures("nothing_stays")


def hold(box: Sandbox, kind: Kind) -> None:
    result = box.run_code(f"{PRELUDE}\n{kind.hold}")
    assert result.ok, result.error


def check(boxes: list[Sandbox], kind: Kind) -> None:
    for box in boxes:
        result = box.run_code(kind.check)
        assert result.value == "True", (box.name, result)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.criu])
def test_what_survives(box: Sandbox, name: str) -> None:
    kind = KINDS[name]
    hold(box, kind)
    snapshot = box.snapshot()
    assert snapshot.engine == ("criu" if kind.fork else "fork"), snapshot.why
    assert not kind.fork or any(words in snapshot.why for words in kind.fork.split("|")), snapshot.why
    copies = Sandbox.restore_many(snapshot, 2)
    try:
        again = copies[0].snapshot(engine="criu")
        copies.append(Sandbox.restore(again))
        again.delete()
        check([*reversed(copies), box], kind)
        assert box.shell("echo on").stdout == "on\n"
    finally:
        snapshot.delete()
        for copy in copies:
            copy.terminate()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.criu])
def test_what_no_engine_takes(box: Sandbox, name: str) -> None:
    kind = KINDS[name]
    hold(box, kind)
    with pytest.raises(SnapshotError, match=box.name) as caught:
        box.snapshot()
    assert all(words in str(caught.value) for words in kind.criu.split("|")), str(caught.value)
    check([box], kind)
    assert box.status == "running" and box.shell("echo on").stdout == "on\n"
