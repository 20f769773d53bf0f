"""What a rule may be, and what it lets through; what is read from a connection's first bytes."""

from __future__ import annotations

import ssl

import pytest

from sandbox_gym.backends.egress import names, sniffing
from sandbox_gym.backends.egress.network import stand_ins
from sandbox_gym.network import MOST_RULES, Allow


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("", "no host"),
        ("http://example.org", "no host"),
        ("example.org/path", "no host"),
        ("example.org:0", "no host"),
        ("example.org:65536", "no host"),
        ("ex ample.org", "no host"),
        ("user@example.org", "no host"),
        ("*", "no host name"),
        ("*.*.org", "no host name"),
        ("a.*.org", "no host name"),
        ("a..org", "no host name"),
        ("-a.org", "no host name"),
        (f"{'a' * 64}.org", "no host name"),
        ("127.1", "no host name"),
        ("0x7f.0.0.0x1", "no host name"),
        ("1.2.3.4.5", "no host name"),
        ("192.0.2.1", "takes a port"),
        ("2001:db8::1", "takes a port"),
        ("127.0.0.1:80", "services="),
        ("[::1]:80", "services="),
        ("0.0.0.0:80", "services="),
        ("[192.0.2.1]:80", "no host"),
    ],
)
def test_what_is_no_rule(rule: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Allow([rule])


@pytest.mark.parametrize(
    ("name", "to"),
    [("localhost", "127.0.0.1:1"), ("a", "b:1"), ("a", "127.0.0.1"), ("1.2.3.4", "127.0.0.1:1")],
)
def test_what_is_no_service(name: str, to: str) -> None:
    with pytest.raises(ValueError, match=r"no|leads|itself|belongs"):
        Allow(services={name: to})


def test_what_is_no_list_of_rules() -> None:
    for bad in ([], "example.org", {"a": "127.0.0.1:1"}, [7], [f"h{i}.org" for i in range(MOST_RULES + 1)]):
        with pytest.raises(ValueError, match=r"list|least|text|most"):
            Allow(bad)  # type: ignore[arg-type]


def test_what_rules_cover() -> None:
    allow = Allow(
        ["Example.ORG.", "*.wild.org", "db.org:5432", "[2001:DB8:0::1]:443"],
        services={"api": "10.0.0.1:8000"},
    )
    assert allow.find("example.org", 80) and allow.find("example.org", 443)
    for host, port in [
        ("example.org", 22),
        ("www.example.org", 443),
        ("badexample.org", 443),
        ("wild.org", 443),
        ("notwild.org", 443),
        ("db.org", 443),
        ("api", 80),
        ("10.0.0.1", 8000),
    ]:
        assert allow.find(host, port) is None, host
    assert allow.find("a.b.wild.org", 443)
    assert allow.find("2001:db8::1", 443)
    service = allow.find("api", 8000)
    assert service is not None and service.to == ("10.0.0.1", 8000)
    assert Allow.from_json(allow.to_json()) == allow
    assert Allow(["bücher.example"]).find("xn--bcher-kva.example", 443)


def test_an_exact_rule_goes_before_a_wildcard() -> None:
    allow = Allow(["*.a.org"], services={"x.a.org:443": "127.0.0.1:9"})
    rule = allow.find("x.a.org", 443)
    assert rule is not None and rule.to == ("127.0.0.1", 9)


def test_addresses_of_names_are_told_apart_and_the_same_in_all_sandboxes() -> None:
    one, other = Allow(["a.org", "b.org", "192.0.2.1:1"]), Allow(["b.org"])
    first, second, third = stand_ins(one)
    assert first != second and first.startswith("127.") and third == "192.0.2.1"
    assert stand_ins(other) == [second]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%lo",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
    ],
)
def test_addresses_that_no_name_may_lead_to(address: str) -> None:
    assert names.public([address]) == ([], address)


def test_public_addresses_pass_beside_others() -> None:
    assert names.public(["10.0.0.1", "8.8.8.8", "2606:4700::1"]) == (["8.8.8.8", "2606:4700::1"], "10.0.0.1")


def hello(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outward = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outward, server_hostname=name).do_handshake()
    return outward.read()


def test_the_name_in_a_client_hello() -> None:
    block = hello("Secure.Test")
    assert sniffing.server_name(block) == "secure.test"
    assert sniffing.server_name(hello(None)) == ""
    for cut in range(len(block)):
        assert sniffing.server_name(block[:cut]) is None
    split = [block[5 : 5 + 40], block[45:]]  # the same in two records
    records = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in split)
    assert sniffing.server_name(records) == "secure.test"


def test_a_broken_client_hello_is_refused_or_incomplete() -> None:
    block = hello("secure.test")
    for at in range(5, len(block)):
        broken = block[:at] + bytes([block[at] ^ 0xFF]) + block[at + 1 :]
        try:
            name = sniffing.server_name(broken)
        except sniffing.Refused:
            continue
        assert name is None or isinstance(name, str)
    with pytest.raises(sniffing.Refused):
        sniffing.server_name(b"\x16\x03\x01\x00\x00")
    with pytest.raises(sniffing.Refused):
        sniffing.server_name(b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00")


@pytest.mark.parametrize(
    "block",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n b: c",
        b"GET / HTTP/1.1\r\nHost : a",
        b"GET / HTTP/1.1\nHost: a",
        b"GET / HTTP/1.1\r\nHost: a\nX: b",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/2",
        b"GET /\0 HTTP/1.1",
        b"\x16\x03\x01",
        b"",
    ],
)
def test_heads_that_could_be_read_in_two_ways(block: bytes) -> None:
    with pytest.raises(sniffing.Refused):
        sniffing.head(block)


@pytest.mark.parametrize(
    "fields",
    [
        [b"Content-Length: 1", b"Content-Length: 2"],
        [b"Content-Length: +1"],
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
    ],
)
def test_bodies_that_could_be_read_in_two_ways(fields: list[bytes]) -> None:
    head = sniffing.head(b"\r\n".join([b"POST / HTTP/1.1", b"Host: a", *fields]))
    with pytest.raises(sniffing.Refused):
        head.body()


def test_a_head_as_the_server_gets_it() -> None:
    block = (
        b"GET http://a/x HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, x-hop, host\r\nX-Hop: 1\r\n"
        b"Proxy-Authorization: s\r\nUpgrade: h2c\r\nX: y"
    )
    assert (
        sniffing.head(block).forwarded(b"/x")
        == b"GET /x HTTP/1.1\r\nhost: a\r\nx: y\r\nconnection: close\r\n\r\n"
    )


def test_answers_to_broken_queries() -> None:
    for query in (
        b"",
        b"\0" * 11,
        b"\0" * 12,
        b"\0\1\1\0\0\1\0\0\0\0\0\0\x3fabc",
        b"\0\1\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1",
    ):
        reply, refused = names.answer(query, lambda name: "127.0.0.2")
        assert refused is None and (reply is None or len(reply) == 12)
    assert names.answer(b"\0\1\x81\0\0\1\0\0\0\0\0\0\1a\0\0\1\0\1", lambda name: None) == (
        None,
        None,
    )  # an answer
