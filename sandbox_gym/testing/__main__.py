"""Runs the conformance suite. The exit status is 1 where a check fails."""

from __future__ import annotations

import argparse
import sys

from sandbox_gym.backends import lookup
from sandbox_gym.testing import NotConforming, Result, conformance


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sandbox_gym.testing", description=__doc__)
    parser.add_argument("backend", help=f"one of {', '.join(lookup.names())}")
    parser.add_argument("only", nargs="*", metavar="CHECK", help="a check's name, or a topic; all by default")
    parser.add_argument("--image", help="what sandboxes are made of, as for Sandbox.create")
    options = parser.parse_args()
    try:
        results = conformance(options.backend, options.only, image=options.image, progress=_tell)
    except NotConforming as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(results)} checks in {sum(result.seconds for result in results):.0f} s")
    return 0


def _tell(result: Result) -> None:
    print(f"{result.verdict:8} {result.seconds:6.2f} s  {result.check}  {result.why}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
