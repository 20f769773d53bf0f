"""All kinds, by name."""

from __future__ import annotations

from tests.kinds.files import FILES
from tests.kinds.processes import PROCESSES
from tests.kinds.sockets import SOCKETS

KINDS = {**PROCESSES, **FILES, **SOCKETS}
