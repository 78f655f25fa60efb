"""Replay: one episode, token by token."""
