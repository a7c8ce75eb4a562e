"""What is asked of a search: the space, constraints, and what is refused."""
