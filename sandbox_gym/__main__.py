"""`python -m sandbox_gym`."""

from __future__ import annotations

import sys

from sandbox_gym.cli import main

sys.exit(main())
