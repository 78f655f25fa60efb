"""The version, importable without the facade."""

__version__ = "0.1.0"
