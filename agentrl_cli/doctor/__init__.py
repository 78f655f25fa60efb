"""Checks of this machine, its sandbox and devices, and of models: `agentrl doctor`."""
