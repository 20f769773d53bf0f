"""Makes every attempt, or those that are named."""

from __future__ import annotations

import json
import sys

from . import devices, kernel, sight, sockets
from .words import REFUSED, attempts


def main() -> None:
    assert devices and kernel and sight and sockets  # each has put its attempts there
    known = json.loads(sys.argv[1])
    for name in sys.argv[2:] or attempts:
        try:
            verdict, evidence = attempts[name](known)
        except Exception as error:
            verdict, evidence = REFUSED, f"{type(error).__name__}: {error}"
        print(json.dumps({"attempt": name, "verdict": verdict, "evidence": evidence[:300]}), flush=True)


main()
