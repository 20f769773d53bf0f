"""What a container is asked to be: everything about its confinement is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandbox_gym.api import SandboxSpec
from sandbox_gym.backends.egress.network import variables
from sandbox_gym.backends.native.rootfs import GUEST_FOLDER, WORKSPACE
from sandbox_gym.backends.shared.environment import guest_environment
from sandbox_gym.network import Allow

from .roots import Root

# What root needs inside to install packages, to serve on low ports and to end programs of other users. Not among them,
# of docker's usual ones: MKNOD, NET_RAW, SYS_CHROOT, SETPCAP, SETFCAP, AUDIT_WRITE.
CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
)
_SHM_BYTES = 1 << 30  # where memory is not limited


def config(
    spec: SandboxSpec,
    root: Root,
    image: str,
    *,
    network: Allow | None,
    labels: Mapping[str, str],
    runtime: str | None,
    sized: bool,
) -> dict[str, Any]:
    """The body of a request that creates a container of `image`. `sized`: its storage driver can bound a disk."""
    return {
        "Image": image,
        "Entrypoint": [],
        "Cmd": [root.python, "-s", f"{GUEST_FOLDER}/start.py", "stdio", *root.path],
        "User": "0:0",
        "Hostname": "sandbox",
        "WorkingDir": spec.workdir or WORKSPACE,
        "Env": [
            f"{name}={value}"
            for name, value in guest_environment(root.python, {**variables(network), **spec.env}).items()
        ],
        "Labels": dict(labels),
        # With its client's connection its input ends, and the guest with that.
        "AttachStdin": True,
        "AttachStdout": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {**_confinement(spec, sized), **_mounts(root.attached), "Runtime": runtime or ""},
    }


def _confinement(spec: SandboxSpec, sized: bool) -> dict[str, Any]:
    limits = spec.limits
    memory = limits.memory_bytes or 0
    return {
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges:true"],  # the daemon's seccomp filter and masked paths stay
        "NetworkMode": "none",
        "Dns": ["127.0.0.1"],  # never the host's: see egress
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},  # what it says is for its client alone
        "NanoCpus": int((limits.cpus or 0) * 1e9),
        "Memory": memory,
        "MemorySwap": memory,  # both together: none of it is swap
        "PidsLimit": limits.pids or -1,
        "ShmSize": memory or _SHM_BYTES,
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "StorageOpt": {"size": str(limits.disk_bytes)} if sized and limits.disk_bytes else {},
    }


def _mounts(attached: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Host folders, read-only. Not recursive: what is mounted below one would be writable on older daemons."""
    return {
        "Mounts": [
            {
                "Type": "bind",
                "Source": source,
                "Target": target,
                "ReadOnly": True,
                "BindOptions": {"NonRecursive": True, "Propagation": "rprivate"},
            }
            for source, target in attached
        ]
    }
