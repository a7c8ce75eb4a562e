"""A plan bound to a graph: what it means, operator by operator, and whether it is legal."""
