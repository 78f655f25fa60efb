"""Means to take rights away from a box: namespaces, users, Landlock, system-call filters, resource limits."""
