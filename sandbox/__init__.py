"""The guest, which runs inside the sandbox: standard library only, loaded by path, no part of the installed package."""
