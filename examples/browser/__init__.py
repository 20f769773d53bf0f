"""A browser that is branched with the page it shows: see examples/README.md."""
