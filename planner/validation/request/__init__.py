"""A row as a request to the search: its model, degrees and recomputation, or the reason why it is refused."""
