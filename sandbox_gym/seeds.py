"""Seeds for copies that are to differ: one for each, never the same, from the system or from a number of the user's."""

from __future__ import annotations

import hashlib
import os

from sandbox_gym.api import Rng


def copy_seeds(rng: Rng, n: int) -> list[int | None]:
    """A 64-bit seed for each of `n` copies; None for each where they keep their origin's random state.

    An int gives the same seeds again, and the first of them don't depend on `n`. Raises ValueError.
    """
    if rng == "same":
        return [None] * n
    if rng == "diverge":
        root = os.urandom(16)
    elif isinstance(rng, int):
        root = str(int(rng)).encode()
    else:
        raise ValueError(f"rng is 'same', 'diverge' or an int, not {rng!r}")
    return [int.from_bytes(hashlib.sha256(root + b":%d" % i).digest()[:8], "little") for i in range(n)]
