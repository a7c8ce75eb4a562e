"""Exported plans, as the settings with which other engines run them, and plans read from such settings."""

__all__: list[str] = []
