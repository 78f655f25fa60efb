"""Folders that the core does not know: delete one with its line in `registry/plugins.py`, and the rest works."""
