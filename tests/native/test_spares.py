"""Parts that are made ahead of need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_RUNS_OUT = """
import errno, os
from sandbox_gym.backends.native.spares import NetnsFactory
from sandbox_gym.backends.native.spawn import make_userns
from sandbox_gym.guest import syscalls

userns = make_userns("0 0 1")


def allow(most):
    if os.fork() == 0:
        syscalls.setns(userns, syscalls.CLONE_NEWUSER)
        with open("/proc/sys/user/max_net_namespaces", "w") as file:
            file.write(str(most))
        os._exit(0)
    assert os.wait()[1] == 0


factory = NetnsFactory(userns)
os.close(factory.take()[0])
allow(0)
taken = []
try:
    while True:  # those kept from before
        taken.append(factory.take())
except OSError as error:
    assert error.errno == errno.ENOSPC, error
assert len(taken) < 20
allow(1000)
factory.take()
print("taken again")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root's own map")
def test_network_namespaces_come_again_once_the_kernel_makes_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUNS_OUT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "taken again\n", done.stderr
