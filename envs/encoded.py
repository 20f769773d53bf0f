"""Any environment with observations that a plain network takes: `make` of `sandbox_gym.guest.encoded`.

That module lies in every sandbox, whatever its image, as `sandbox_gym_guest.encoded`; this is its name where
sandbox_gym is installed: `entry_point="sandbox_gym.envs.encoded:make"`.
"""

from __future__ import annotations

from sandbox_gym.guest.encoded import make

__all__ = ["make"]
