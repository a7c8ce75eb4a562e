"""Rewrites of a traced graph: what is written out in several operators, and has a rule as one."""
