"""Measurements of sa-jobs beside the limits of the same machine. `python -m benchmarks --list`."""
