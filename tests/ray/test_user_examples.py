"""The numbered examples that need Ray, on the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_users import run

EXPECTED = {
    "a4_rollout": r"book_viewing 0\.968\nask_budget 0\.653\noffer_callback 0\.368\n60 rollouts, 3 scores\n",
    "a6_again": r"the same again: True\nscored on (cpu|cuda)\n",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_runs(name: str, cluster: Any, tmp_path: Path) -> None:
    result = run(name, tmp_path, RAY_ADDRESS=cluster.address)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(EXPECTED[name], result.stdout), result.stdout
