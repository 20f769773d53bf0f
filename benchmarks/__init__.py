"""One module for each measurement: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
