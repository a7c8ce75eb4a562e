"""Reports of plans for people."""

__all__: list[str] = []
