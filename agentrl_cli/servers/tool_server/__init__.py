"""The tools of a project over HTTP."""
