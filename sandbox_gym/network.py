"""What a sandbox may reach: the rules a user gives, and the records of what was tried."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WEB_PORTS = (80, 443)  # HTTP and TLS, where a rule names no port
MOST_RULES = 64  # each has up to two listening sockets in each sandbox
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*", re.ASCII)


def as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A literal address; None for what is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if getattr(address, "scope_id", None) else address


def as_host(host: str) -> str:
    """A name in lower case and without its last dot, or an address in its shortest form. Raises ValueError."""
    address = as_address(host)
    if address is not None:
        return str(address)
    name = host.lower().removesuffix(".")
    if not name.isascii():
        name = name.encode("idna").decode()
    labels = name.split(".")
    # The C library reads 127.1 and 0x7f.1 as addresses: no such thing is a name.
    if (
        len(name) > 253
        or not all(_LABEL.fullmatch(label) for label in labels)
        or _NUMBER.fullmatch(labels[-1])
    ):
        raise ValueError(f"{host[:300]!r} is no host name and no address")
    return name


def split_port(text: str) -> tuple[str, int | None]:
    """Host and port of `host`, `host:port`, `[address]:port` or a bare address. Raises ValueError."""
    if as_address(text) is not None:
        return text, None
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:@/\s]+))(?::([0-9]{1,5}))?", text, re.ASCII)
    if not match or (match[3] and not 0 < int(match[3]) < 65536) or (match[1] and ":" not in match[1]):
        raise ValueError(f"{text[:300]!r} is no host and no host:port")
    return match[1] or match[2], int(match[3]) if match[3] else None


@dataclass(frozen=True)
class Rule:
    """`host`: a name, `*.name` for all names below it, or an address. `port`: None for HTTP (one request a connection,
    and no upgrades) and TLS on 80 and 443, with the name inside checked; a port of its own lets all pass. `to`: the
    address and port that it leads to; None: what the name resolves to, if that is a public address.
    """

    host: str
    port: int | None
    to: tuple[str, int] | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        return WEB_PORTS if self.port is None else (self.port,)

    def covers(self, host: str) -> bool:
        """Whether the rule is of this host, in the form of `as_host`."""
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return host == self.host


class Allow:
    """What a sandbox may reach. All else is refused, name look-ups too.

    `hosts`: each `"example.org"` (HTTP and HTTPS, on ports 80 and 443), `"*.example.org"` (the names below it),
    `"example.org:5432"` (anything on that port), `"192.0.2.10:443"` or `"[2001:db8::1]:443"`. A name that resolves to
    an address that isn't public (loopback, private, link-local) is refused.
    Inside, nothing else can listen at 0.0.0.0 on a port of a rule's.
    `services`: of this host or its own networks, under names for the sandbox: `{"api": "127.0.0.1:8000"}` is reached as
    `api:8000`, and `{"api:80": "127.0.0.1:8000"}` as `api:80`.

    Raises ValueError for what is no such rule, with what would be one.
    """

    def __init__(self, hosts: Iterable[str] = (), *, services: Mapping[str, str] | None = None) -> None:
        if isinstance(hosts, str):
            raise ValueError(f"hosts is a list: Allow([{hosts!r}])")
        if isinstance(hosts, Mapping):
            raise ValueError(
                "hosts is a list; names of your own go into Allow(services={name: 'address:port'})"
            )
        rules = [_host_rule(host) for host in hosts]
        rules += [_service_rule(name, to) for name, to in (services or {}).items()]
        self.rules: tuple[Rule, ...] = tuple(dict.fromkeys(rules))
        if not self.rules:
            raise ValueError("Allow needs at least one rule; network=None is a closed network")
        if len(self.rules) > MOST_RULES:
            raise ValueError(f"Allow takes at most {MOST_RULES} rules, not {len(self.rules)}: use '*.name'")

    def find(self, host: str, port: int) -> Rule | None:
        """The rule that lets this host and port through, an exact one first; `host` in the form of `as_host`."""
        found = [rule for rule in self.rules if port in rule.ports and rule.covers(host)]
        return min(found, key=lambda rule: (rule.host.startswith("*."), rule.port is None), default=None)

    def knows(self, name: str) -> Rule | None:
        """The rule that a look-up of this name is answered by, whatever the port: an exact one first."""
        found = [rule for rule in self.rules if as_address(rule.host) is None and rule.covers(name)]
        return min(found, key=lambda rule: rule.host.startswith("*."), default=None)

    def to_json(self) -> list[Any]:
        return [[rule.host, rule.port, rule.to] for rule in self.rules]

    @classmethod
    def from_json(cls, rows: list[Any]) -> Allow:
        made = cls.__new__(cls)
        made.rules = tuple(Rule(host, port, tuple(to) if to else None) for host, port, to in rows)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allow) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __repr__(self) -> str:
        shown = [
            f"{rule.host}{f':{rule.port}' if rule.port else ''}{f' -> {rule.to[0]}:{rule.to[1]}' if rule.to else ''}"
            for rule in self.rules
        ]
        return f"<Allow {', '.join(shown)}>"


def _host_rule(text: str) -> Rule:
    if not isinstance(text, str):
        raise ValueError(f"a rule is a text like 'example.org' or '192.0.2.10:443', not {text!r}")
    host, port = split_port(text)
    if host.startswith("*."):
        return Rule(f"*.{_as_name(host[2:])}", port)
    name = as_host(host)
    address = as_address(name)
    if address is None:
        return Rule(name, port)
    if address.is_loopback or address.is_unspecified:
        raise ValueError(
            f"{name} is the sandbox's own inside: give what listens there on this host a name, "
            f"Allow(services={{'api': '127.0.0.1:{port or 8000}'}})"
        )
    if port is None:
        raise ValueError(f"an address takes a port: '{f'[{name}]' if address.version == 6 else name}:443'")
    return Rule(name, port, (name, port))


def _service_rule(name: str, to: str) -> Rule:
    if not isinstance(name, str) or not isinstance(to, str):
        raise ValueError(f"services are names with 'address:port', not {name!r}: {to!r}")
    host, port = split_port(to)
    address = as_address(host)
    if address is None or port is None:
        raise ValueError(f"service {name!r} leads to an address and port ('127.0.0.1:8000'), not {to!r}")
    inside, own_port = split_port(name)
    wildcard = inside.startswith("*.")
    inside = _as_name(inside.removeprefix("*."))
    if inside == "localhost" or inside.endswith(".localhost"):
        raise ValueError(f"{inside!r} is the sandbox itself: give service {to!r} another name")
    return Rule(f"*.{inside}" if wildcard else inside, own_port or port, (str(address), port))


def _as_name(text: str) -> str:
    name = as_host(text)
    if as_address(name) is not None:
        raise ValueError(f"{text!r} is an address, where a name belongs")
    return name


@dataclass(frozen=True)
class NetworkRecord:
    """One thing that a sandbox tried. `time`: seconds since 1970. `kind`: "connect" (a tunnel through the proxy),
    "http" (a request through it, or to port 80), "tcp" (a connection straight to a name or address), "dns", or "proxy"
    (what has not come to any of these). `verdict`: "allowed" or "denied", and `reason` says why, or how an allowed one
    failed. `sent`, `received`: bytes from and to the sandbox so far.
    """

    time: float
    kind: str
    host: str
    port: int
    verdict: str
    reason: str
    sent: int
    received: int
