"""Attempts to escape and to snoop come to what SECURITY.md says, in every backend; tables are what was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gym.testing.suite import behaviours
from tests.backends import attempts, documents
from tests.backends.conftest import Ready
from tests.backends.test_conformance import BACKENDS

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attempts_come_to_what_is_said(backend: str, ready: Ready) -> None:
    ready(backend)
    found = attempts.run(backend)
    assert found == attempts.kept(backend)
    assert len(found) >= 60


SNOOPING = [
    "a host file by its path",
    "files in home folders",
    "command lines of other processes",
    "environment variables of other processes",
    "abstract sockets of the host and of others",
    "shared memory of the host and of others",
    "servers on the host's loopback and other addresses",
    "sockets of container engines and of the system",
    "namespaces that are the host's",
]


def test_the_attempts_are_real() -> None:
    """Made on the host itself they find what was planted: what a sandbox refuses is there to be had."""
    with attempts.planted() as plant:
        assert attempts.on_the_host(plant, SNOOPING) == dict.fromkeys(SNOOPING, "possible")
        with pytest.raises(AssertionError, match="was connected to"):
            plant.unharmed()


@pytest.mark.parametrize("document", documents.DOCUMENTS)
def test_tables_are_what_was_made(document: str) -> None:
    name, text = documents.DOCUMENTS[document]
    path = ROOT / document
    assert path.read_text() == documents.placed(path, name, text()), "run python -m tests.backends.documents"


def test_every_topic_has_a_row() -> None:
    topics = {name.partition(".")[0] for name in behaviours()}
    assert topics == set(documents.TOPICS)
