"""How large a small plan may be."""

PROCESSES = 16
"""Processes of a small plan, at most."""
