"""B 12. `run_code` returns what was printed, the value, errors as data, and the charts that were drawn as PNG bytes.

Needs matplotlib where the code runs: by default, in this Python environment.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sandbox_gym import Sandbox

CHART = """
import matplotlib.pyplot as plt
rewards = [0.1, 0.4, 0.35, 0.8]
plt.plot(rewards)
plt.title("reward")
plt.show()
print("drawn")
max(rewards)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Sandbox.create() as box:
        result = box.run_code(CHART, timeout=100)
        (chart,) = result.artifacts
        place = Path(folder) / "reward.png"
        place.write_bytes(chart.data)
        print(result.stdout.strip(), result.value, chart.mime, place.read_bytes()[1:4].decode())
        failed = box.run_code("rewards[9]")
        print(failed.ok, failed.error)


if __name__ == "__main__":
    main()
