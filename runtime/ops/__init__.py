"""Operators on local shards: products, attention, norms, cross entropy, experts, random numbers."""
