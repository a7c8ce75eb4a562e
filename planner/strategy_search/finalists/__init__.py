"""Finalists: plans of the best configurations, settled, priced by `predict`, each in its fastest schedule."""
