"""The tables of backends in README.md and SECURITY.md, made of what backends declare and of what attempts came to.

python -m tests.backends.documents            writes both anew
python -m tests.backends.documents docker     before that, runs the attempts of probe/ in this backend, and keeps them
"""

from __future__ import annotations

import sys
from pathlib import Path

from sandbox_gym.backends import lookup
from sandbox_gym.testing.suite import behaviours
from tests.backends import attempts

ROOT = Path(__file__).resolve().parent.parent.parent
BACKENDS = sorted(lookup.BUILT_IN, key=["native", "docker", "gvisor"].index)
TOPICS = {
    "create": "create: names, variables, mounts, time-out",
    "code": "run code: state, errors, time-outs, bounds",
    "exec": "shell and exec: the same for commands",
    "files": "files both ways",
    "processes": "processes, terminals, sessions",
    "limits": "limits: memory, processes, disk, cpu",
    "snapshot": "snapshot and restore",
    "checkpoint": "checkpoint and rewind",
    "capture": "captured: threads, processes, terminals, connections inside, open files",
    "fork": "fork: copies sealed from each other",
    "rng": "chance: the same, diverging, seeded",
    "isolation": "isolation from the host and from others",
    "network": "network: closed, or by rules",
    "failure": "failures: crashes, lies, kills",
    "lifetime": "lifetimes",
    "image": "images",
    "env": "Gymnasium environments and vectors",
}


def backends() -> str:
    """How many checks of each topic a backend passes, and what it declares not to do."""
    names = list(behaviours())
    declared = {backend: {d.check: d.why for d in lookup.deviations(backend)} for backend in BACKENDS}
    rows = [["", *BACKENDS]]
    for topic, title in TOPICS.items():
        checks = [name for name in names if name.startswith(f"{topic}.")]
        lacking = [sum(name in declared[backend] for name in checks) for backend in BACKENDS]
        cells = [f"{len(checks) - lack} of {len(checks)}" if lack else f"{len(checks)}" for lack in lacking]
        rows.append([title, *cells])
    lines = [_table(rows)]
    for backend in BACKENDS:
        lines += [f"- {backend}, `{check}`: {why}" for check, why in declared[backend].items()]
    return "\n".join(lines if len(lines) == 1 else [lines[0], "", *lines[1:]])


def security() -> str:
    """What came of each attempt, in each backend."""
    kept = {backend: attempts.kept(backend) for backend in BACKENDS}
    rows = [["attempt", *BACKENDS]]
    rows += [[name, *(kept[backend][name] for backend in BACKENDS)] for name in kept[BACKENDS[0]]]
    return _table(rows)


def placed(document: Path, name: str, text: str) -> str:
    """The document with `text` between its marks of that name."""
    begin, end = (
        f"<!-- {name}: made by `python -m tests.backends.documents` -->\n",
        f"<!-- end of {name} -->",
    )
    head, found, rest = document.read_text().partition(begin)
    assert found and end in rest, f"{document} has no marks of {name}"
    return head + begin + text + "\n" + end + rest.partition(end)[2]


DOCUMENTS = {"README.md": ("backends", backends), "SECURITY.md": ("attempts", security)}


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> None:
    for backend in sys.argv[1:]:
        attempts.keep(backend, attempts.run(backend))
    for name, (mark, text) in DOCUMENTS.items():
        path = ROOT / name
        path.write_text(placed(path, mark, text()))


if __name__ == "__main__":
    main()
