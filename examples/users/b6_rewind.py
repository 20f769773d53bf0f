"""B 6. A checkpoint, a risky command, and back, disk and memory, where it failed."""

from __future__ import annotations

from sandbox_gym import Sandbox


def main() -> None:
    with Sandbox.create() as box:
        box.write_file("data.db", "three rows\n")
        box.run_code("rows = 3")
        box.checkpoint("before migration")
        box.run_code("rows = 0")
        migration = box.shell("rm data.db; echo no such column >&2; exit 1")
        if not migration.ok:
            box.rewind("before migration")
        print(migration.stderr.strip(), "->", box.read_text("data.db").strip(), box.run_code("rows").value)


if __name__ == "__main__":
    main()
