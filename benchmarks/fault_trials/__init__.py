"""The trials of benchmarks/faults.py, one a file."""
