"""A row beside its prediction, and errors over many rows."""
