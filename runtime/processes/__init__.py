"""Processes of a run: how they start and end, what is heard of them, and who is slow or hangs."""
