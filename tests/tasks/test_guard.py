"""The guard of a check's Python programs leaves honest ones alone, however they are started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sandbox_gym.tasks import Prepared, Task
from tests.tasks.conftest import DOUBLE

Prepare = Callable[[Task], Prepared]

HONEST = {
    "plain": "def double(x):\n    return x + x\n",
    "forks": "import os\nif os.fork() == 0:\n    raise SystemExit(3)\nos.wait()\ndef double(x):\n    return x + x\n",
    "threads": """
import threading
threading.Thread(target=print, args=("later",)).start()
def double(x):
    return x + x
""",
    "processes": """
import multiprocessing
def twice(x):
    return x + x
def double(x):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(twice, (x,))
""",
    "a program of its own": """
import subprocess, sys
def double(x):
    code = f"import sys; print({x} + {x}); sys.exit(0)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
if __name__ == "__main__":
    raise SystemExit(0)
""",
    "leaves a process": """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
def double(x):
    return x + x
""",
    "catches": """
def double(x):
    try:
        raise SystemExit(0)
    except SystemExit:
        return x + x
""",
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_solution(name: str, double: Prepared) -> None:
    with double.start() as box:
        box.write_file("calc.py", HONEST[name])
        found = double.grade(box)
    assert (found.score, found.flags) == (1.0, ()), found


CODE = "import sys, calc; assert calc.double(2) == 4; sys.exit(%s)"
CHECKS = {
    "script with arguments": "python -u -W error check.py a -m b",
    "module": "python -m check",
    "options in one word": "python -Bm check",
    "glued": "python -mcheck",
    "module with arguments": "python -m unittest -q check_case.Case",
    "code": f"python -c '{CODE % ''}'",
    "code in one word": f"python -uc '{CODE % 0}'",
    "standard input": "python - <<< 'import calc; assert calc.double(2) == 4'",
    "standard input, no dash": "echo 'import calc; assert calc.double(2) == 4' | python",
    "pytest": "pytest -q check_test.py",
    "pytest, its own path": "PYTHONPATH=. python -m pytest -q check_test.py",
    "PYTHONPATH": "export PYTHONPATH=lib:$PYTHONPATH; python -c 'import inner, calc; assert calc.double(2) == 4'",
    "PYTHONPATH in a script": "bash paths.sh && env PYTHONPATH=lib python calc_main.py",
    "pytest from a script": "python run.py",
    "by a shell script": "bash check.sh",
    "an agent's program": "python calc_main.py && test $(python calc_main.py) = 4",
    "several": "python check.py && python -m pytest -q check_test.py && python -c pass",
    "as another program's": "env A=b timeout 60 python check.py",
}
HIDDEN = {
    "check.py": "import sys, calc\nassert calc.double(2) == 4\nassert __name__ == '__main__'\n"
    "assert sys.modules['__main__'].calc is calc\n",
    "check_test.py": "import calc, pytest\n\ndef test_double():\n    assert calc.double(2) == 4\n\n"
    "@pytest.mark.skip\ndef test_other():\n    pass\n\n@pytest.mark.xfail\ndef test_third():\n    assert 0\n",
    "check_case.py": "import unittest, calc\nclass Case(unittest.TestCase):\n    def test(self):\n"
    "        self.assertEqual(calc.double(2), 4)\n    @unittest.skip('so')\n    def test_other(self):\n        pass\n",
    "run.py": "import pytest, sys\nsys.exit(pytest.main(['-q', 'check_test.py']))\n",
    "paths.sh": "PYTHONPATH=lib python -c 'import inner, calc; assert calc.double(2) == 4'",
    "lib/inner.py": "",
    "check.sh": "set -e\npython check.py\npython -m pytest -q check_test.py\n",
}
MAIN = "import calc\nprint(calc.double(2))\nraise SystemExit(0)\n"


@pytest.mark.parametrize("name", CHECKS)
def test_however_a_check_is_started(name: str, prepared: Prepare) -> None:
    """Right is 1 and wrong is 0, and a solution that ends the process is flagged wherever it could end with 0."""
    task = replace(DOUBLE, id=name, check=CHECKS[name], hidden=HIDDEN, solution="", carry=())
    ready = prepared(task)
    assert ready.untouched.score == 0.0
    with ready.start() as box:
        box.write_file("calc_main.py", MAIN)
        box.write_file("calc.py", HONEST["plain"])
        found = ready.grade(box)
        assert (found.score, found.flags) == (1.0, ()), found
        box.write_file("calc.py", "import os\nos._exit(0)\n")
        assert ready.grade(box).score == 0.0


def test_a_solution_may_change_a_module_that_python_has_too(prepared: Prepare) -> None:
    """What the task began with is the workspace's own, though it is named like something that is installed."""
    task = replace(
        DOUBLE,
        id="own",
        files={"iniconfig.py": "def double(x):\n    return x\n"},
        hidden={"check.py": "import iniconfig\nassert iniconfig.double(2) == 4\n"},
        solution="sed -i 's/return x/return x + x/' iniconfig.py",
    )
    with prepared(task).start() as box:
        assert box.shell(task.solution).ok
        assert prepared(task).grade(box).solved
