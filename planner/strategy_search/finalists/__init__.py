"""Finalists: plans of the best configurations, settled, priced by the judge, each in its fastest schedule."""
