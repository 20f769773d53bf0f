"""The numbered examples run as they are, each in a process of its own, and print what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED = {
    "a1_create": r"running\nOSError: \[Errno 101\] Network is unreachable\n",
    "a2_play": r"0\.968\n'customer: Tomorrow would be fine\.'\n",
    "a3_snapshot": r"the sandbox runs on, at 0\.668\nanother process scores 0\.968\n",
    "a5_watch": r"ID +NAME +STATE +AGE +FROM +MEMORY +CLIENT\n.*"
    r"\w{12} +rollout-1 +running +\d+ s  \w{12} +[\d.]+ \w+ +\d+\n.*"
    r"\w{12} call  running .*\n   ├─ \w{12} rollout-\d  running .*",
    "b1_prepare": r"task-base 1 commit\nfrom the template: def area\(a, b\): return a \+ b\n",
    "b2_fork": r"ep-1 ep-2 ep-3 ep-4 ep-5 ep-6 ep-7 ep-8\n\['of the base', 'of ep-8'\] \[7\]\n"
    r"\['of the base'\] \[\]\nep-1 000\nopen-1 403\n",
    "b4_graded": r"half 0\.67 \nwhole 1\.0 \ncheat 0\.0 flagged\n",
    "b5_cleanup": r"deleted: terminated terminated terminated\nafter its time to live: True\nidle: True\n"
    r"put to rest: True awake: 1\nwith its script: True - the script crashed\n",
    "b6_rewind": r"no such column -> three rows 3\n",
    "b7_race": r"halved - tests pass\nreturn sorted\(numbers\)\[len\(numbers\) // 2\]\n2 sandboxes live\n"
    r"the origin is untouched: True\n",
    "b8_explore": r"the fastest: formula -> 49999995000000\nformula: passed, exit code 0\n"
    r"loop: passed, exit code 0\nno such program: failed, exit code 127\n",
    "b9_eval": r"count 2 of 2\nnewest 2 of 2\nsecret 0 of 2\npass@1 0\.67, 0 errors\n",
    "b10_network": r"set-up: a package\nset-up, elsewhere: False\nrollout has a package\nrollout fetches: False\n"
    r"rollout, by address: False\n\[\('index', 'allowed'\), \('answers.test', 'denied'\)\]\n",
    "b11_timeouts": r"\[False, True, True, False\] \[True, False, False, True\]\nwithin 10 s: True\n"
    r"and they live on: yes 'yes'\n",
    "b12_run_code": r"drawn 0\.8 image/png PNG\nFalse IndexError: list index out of range\n",
    "b13_audit": r"reward 1\.0 - what has it done\?\ncreate   task-base\nwrite    grade.py\nsnapshot \n"
    r"restore  ep-1\nshell    ls\nshell    cat grade.py\nwrite    grade.py\nexec     python3 grade.py\n"
    r"end      it was terminated\n",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_runs(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(EXPECTED[name], result.stdout, re.DOTALL), result.stdout


def run(name: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"examples.users.{name}"],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
