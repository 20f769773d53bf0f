"""The README's Python that needs Ray, on the cluster that RAY_ADDRESS names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import PLAIN, blocks, run


@pytest.mark.parametrize(
    "code", [code for code in blocks("python") if code not in PLAIN], ids=lambda code: code.splitlines()[0]
)
def test_python(code: str, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    run(code, tmp_path)
