"""The docker daemon of this machine: each call has a deadline of its own, and fails as one of our errors."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import docker
import docker.errors
import requests

from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError, SandboxTimeout

_ANSWER = 20.0  # seconds for what takes the daemon no work
# The SDK keeps a pool of connections for each path, closes the oldest even while another thread uses it, and keeps them
# open: so as many as there can be calls at once, and none kept.
_POOLS = 1024
_MOST_HEAD = 1 << 14
_OLDEST_API = (1, 41)  # docker 20.10's
START_IT = "start one (systemctl start docker; on Debian apt-get install docker.io brings it), or name its socket by "
START_IT += "DOCKER_HOST=unix:///path"


class Refused(SandboxError):
    """The daemon answered, and the answer is no. `status`: the HTTP one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"docker: {message}")
        self.status = status


class Daemon:
    """Thread-safe. `url`: its socket, as `unix:///path`; None takes what DOCKER_HOST says, or the usual one."""

    def __init__(self, url: str | None = None) -> None:
        self.url = url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not self.url.startswith("unix://"):
            raise BackendUnavailable(
                f"sandboxes need a docker daemon on this machine, by its unix socket, and DOCKER_HOST is {self.url}: "
                "unset it, or set it to unix:///var/run/docker.sock"
            )
        try:
            with socket.socket(
                socket.AF_UNIX
            ) as sock:  # one of the package's that finds nobody stays open for a while
                sock.settimeout(_ANSWER)
                sock.connect(self.url.removeprefix("unix://"))
            self._api = docker.APIClient(base_url=self.url, version="auto", timeout=_ANSWER, num_pools=_POOLS)
        except (OSError, docker.errors.DockerException, requests.RequestException) as error:
            raise BackendUnavailable(
                f"no docker daemon answers at {self.url} ({error}): {START_IT}"
            ) from None
        self._api.close()  # the connection that asked for the version
        self._api.headers["Connection"] = "close"
        self._root = f"{self._api.base_url}/v{self._api.api_version}"
        if tuple(map(int, self._api.api_version.split("."))) < _OLDEST_API:
            raise BackendUnavailable(f"the docker daemon at {self.url} is too old: 20.10 or newer is needed")

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        archive: IO[bytes] | None = None,
        timeout: float = _ANSWER,
    ) -> Any:
        """What the daemon answers, as JSON; None where that is nothing. `archive`: a tar file in the body's place.

        Raises Refused, SandboxTimeout, and SandboxDied when the daemon is gone.
        """
        with self._answered(method, path, timeout):
            reply = self._api.request(
                method,
                f"{self._root}{path}",
                params=dict(params or {}),
                json=body,
                data=archive,
                headers={"Content-Type": "application/x-tar"} if archive is not None else None,
                timeout=timeout,
            )
            text = reply.text
        if reply.status_code >= 400:
            raise Refused(reply.status_code, _message(text))
        if archive is not None:  # a line for each step
            text = text.strip().rpartition("\n")[2]
            if "errorDetail" in text:
                raise Refused(reply.status_code, _message(text))
        return json.loads(text) if text.strip() else None

    @contextlib.contextmanager
    def _answered(self, method: str, path: str, timeout: float) -> Iterator[None]:
        try:
            yield
        except requests.Timeout:
            raise SandboxTimeout(f"docker did not answer {method} {path} within {timeout:g} s") from None
        except requests.RequestException as error:
            raise SandboxDied(f"the docker daemon at {self.url} is gone ({error}): {START_IT}") from None

    def attach(self, container: str, *, timeout: float = _ANSWER) -> socket.socket:
        """A blocking connection to a container's standard input and output, before it starts."""
        path = f"/containers/{container}/attach?stream=1&stdin=1&stdout=1"
        return self._converse("POST", path, ("Connection: Upgrade", "Upgrade: tcp"), timeout)

    def events(self, *, since: float, filters: Mapping[str, Sequence[str]]) -> socket.socket:
        """A connection that brings a line of JSON for each event."""
        query = urllib.parse.urlencode({"since": f"{since:.9f}", "filters": json.dumps(filters)})
        return self._converse("GET", f"/events?{query}", (), _ANSWER)

    def _converse(self, method: str, path: str, headers: Sequence[str], timeout: float) -> socket.socket:
        """A connection of the caller's own, with what comes after the answer's head: the SDK keeps its sockets to
        itself, and one that is read in another thread can't be ended through it.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(self.url.removeprefix("unix://"))
            # 1.0: what follows comes as it is, not in chunks.
            first = f"{method} /v{self._api.api_version}{path} HTTP/1.{1 if headers else 0}"
            sock.sendall("\r\n".join((first, "Host: docker", *headers, "", "")).encode())
            head = b""
            while b"\r\n\r\n" not in head:
                byte = sock.recv(1)  # no more: the rest is the caller's
                if not byte or len(head) > _MOST_HEAD:
                    raise SandboxDied(f"the docker daemon at {self.url} ended a connection: {START_IT}")
                head += byte
            status = int(head.split(b" ", 2)[1])
            if status not in (101, 200):
                raise Refused(status, _message(sock.recv(1 << 16).decode(errors="replace")))
            sock.settimeout(None)
        except TimeoutError:
            sock.close()
            raise SandboxTimeout(f"docker did not answer {method} {path} within {timeout:g} s") from None
        except OSError as error:
            sock.close()
            if isinstance(error, SandboxError):
                raise
            raise SandboxDied(f"the docker daemon at {self.url} is gone ({error}): {START_IT}") from None
        except BaseException:
            sock.close()
            raise
        return sock

    # ---- what the rest is made of ---------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/info"))

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/containers/{container}/json"))

    def containers(self, label: str, *, size: bool = False) -> list[dict[str, Any]]:
        """Of all states, with that label (`name` or `name=value`)."""
        params = {"all": 1, "size": int(size), "filters": _labelled(label)}
        return list(self.ask("GET", "/containers/json", params=params, timeout=3 * _ANSWER))

    def images(self, label: str) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/images/json", params={"all": 1, "filters": _labelled(label)}))

    def networks(self, label: str) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/networks", params={"filters": _labelled(label)}))

    def volumes(self, label: str) -> list[dict[str, Any]]:
        found = self.ask("GET", "/volumes", params={"filters": _labelled(label)})
        return list(found["Volumes"] or ())

    def remove_container(self, container: str, *, timeout: float = 3 * _ANSWER) -> None:
        """Kills it first; returns when it is gone, whoever has removed it."""
        try:
            self.ask("DELETE", f"/containers/{container}", params={"force": 1, "v": 1}, timeout=timeout)
        except Refused as refused:
            if refused.status == 409:  # it is being removed already, by the daemon since it ended
                with contextlib.suppress(Refused):
                    waiting = {"condition": "removed"}
                    self.ask("POST", f"/containers/{container}/wait", params=waiting, timeout=timeout)
            elif refused.status != 404:
                raise

    def remove_image(self, image: str) -> bool:
        """Whether it is gone: not while a container or an image is made of it."""
        try:
            self.ask("DELETE", f"/images/{image}", params={"noprune": 1, "force": 1}, timeout=3 * _ANSWER)
        except Refused as refused:
            if refused.status not in (404, 409):
                raise
            return refused.status == 404
        return True


def _labelled(label: str) -> str:
    return json.dumps({"label": [label]})


def _message(text: str) -> str:
    """Of an answer that is a refusal."""
    try:
        said = json.loads(text)
        return str(said.get("message") or said.get("error") or said)
    except (ValueError, AttributeError):
        return text.strip()[:2000]
