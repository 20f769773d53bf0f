"""A 1. A sandbox: one cpu, 1 GiB, no network, kept for half an hour without a call."""

from __future__ import annotations

from sandbox_gym import Sandbox


def main() -> None:
    with Sandbox.create(cpus=1, memory="1Gi", network=None, idle_timeout=30 * 60) as box:
        print(box.status)
        print(box.run_code("import socket; socket.create_connection(('192.0.2.1', 80), timeout=2)").error)


if __name__ == "__main__":
    main()
