"""Processes of a run: how they start and end, how they are monitored, and which are slow or hang."""
