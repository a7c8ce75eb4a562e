"""The engine of the search: it evaluates configurations one by one. `finalists` makes plans of the best of them."""
