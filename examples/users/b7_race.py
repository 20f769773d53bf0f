"""B 7. Several patches at once: a fork for each, applied and tested there; the first that passes stays."""

from __future__ import annotations

from sandbox_gym import Sandbox, race

BROKEN = "def middle(numbers):\n    return sorted(numbers)[len(numbers)]\n"
TESTS = (
    "from median import middle\nassert middle([3, 1, 2]) == 2\nassert middle([5]) == 5\nprint('tests pass')\n"
)
PATCHES = {
    "off by one": "sed -i 's/len(numbers)/len(numbers) - 1/' median.py",
    "does not apply": "patch -p1 < missing.patch",
    "halved": "sed -i 's/len(numbers)/len(numbers) \\/\\/ 2/' median.py",
}


def main() -> None:
    with Sandbox.create() as box:
        box.write_file("median.py", BROKEN)
        box.write_file("tests.py", TESTS)
        with race(box, PATCHES, "python3 tests.py", timeout=120) as tried:
            assert tried.winner is not None and tried.sandbox is not None, [trial.outputs for trial in tried]
            print(tried.winner.name, "-", tried.winner.outputs[-1].stdout.strip())
            print(tried.sandbox.read_text("median.py").splitlines()[1].strip())
            print(len(Sandbox.list()), "sandboxes live")
        print("the origin is untouched:", box.read_text("median.py") == BROKEN)


if __name__ == "__main__":
    main()
