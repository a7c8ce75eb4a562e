"""Prices rows: the plan of a run, its time and its peak, for many rows at once."""
