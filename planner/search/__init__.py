"""The search: cost tables, problems, solvers, and the space around them."""

__all__: list[str] = []
