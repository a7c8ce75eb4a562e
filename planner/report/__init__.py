"""Plans for people to read."""

__all__: list[str] = []
