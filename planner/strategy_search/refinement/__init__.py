"""Searches around the best plan, for what the search itself leaves out: rings, offload, unequal stages, simplicity."""
