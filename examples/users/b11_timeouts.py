"""B 11. Every call has a time-out: an episode that hangs ends with `timed_out`, and does not hold the batch."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from sandbox_gym import CodeResult, ExecResult, Sandbox


def play(copy: Sandbox, episode: int) -> CodeResult | ExecResult:
    if episode == 1:
        return copy.shell("while :; do :; done", timeout=1)
    if episode == 2:
        return copy.run_code("while True: pass", timeout=1)
    return copy.shell(f"echo {episode}", timeout=10)


def main() -> None:
    with Sandbox.create() as base:
        copies = base.fork(4)
        started = time.monotonic()
        with ThreadPoolExecutor() as pool:  # one client, shared by all threads
            results = list(pool.map(play, copies, range(4)))
        print([result.timed_out for result in results], [result.ok for result in results])
        print("within 10 s:", time.monotonic() - started < 10)
        print(
            "and they live on:", copies[1].shell("echo yes").stdout.strip(), copies[2].run_code("'yes'").value
        )
        for copy in copies:
            copy.terminate()


if __name__ == "__main__":
    main()
