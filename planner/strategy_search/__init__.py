"""The search: cost tables, pieces and their prices, solvers, and the space around them."""
