"""The plan: what was decided, as data, as a file, bound to its graph, priced and checked."""

__all__: list[str] = []
