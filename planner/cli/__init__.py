"""The command line `plan`."""

__all__: list[str] = []
