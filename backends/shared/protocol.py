"""What client and supervisor say to each other: one JSON message a datagram, descriptors beside it."""

from __future__ import annotations

import array
import dataclasses
import json
import socket
from typing import Any

from sandbox_gym.api import Limits, Mount, SandboxSpec
from sandbox_gym.network import Allow

_MAX_MESSAGE = 1 << 16  # a larger buffer would be mapped and unmapped by malloc for each message


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    block = json.dumps(message).encode()
    if len(block) > _MAX_MESSAGE:
        raise ValueError(
            f"{len(block)} bytes are over the bound of {_MAX_MESSAGE}: pass less in env= or mounts="
        )
    sock.sendmsg([block], rights)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Raises EOFError when the other side is gone."""
    block, ancillary, _, _ = sock.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(64 * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not block:
        raise EOFError("the connection closed")
    message = json.loads(block)
    assert isinstance(message, dict)
    return message, list(fds)


def spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    fields = dataclasses.asdict(spec)
    fields["network"] = spec.network.to_json() if spec.network is not None else None
    fields["limits"]["explicit"] = sorted(spec.limits.explicit)
    return fields


def spec_from_json(fields: dict[str, Any]) -> SandboxSpec:
    limits = dict(fields["limits"], explicit=frozenset(fields["limits"]["explicit"]))
    mounts = tuple(Mount(**mount) for mount in fields["mounts"])
    network = Allow.from_json(fields["network"]) if fields.get("network") else None
    return SandboxSpec(**{**fields, "limits": Limits(**limits), "mounts": mounts, "network": network})
