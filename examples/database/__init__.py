"""A database that serves while it is branched: see examples/README.md."""
