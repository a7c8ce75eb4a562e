"""The engine of the search: it evaluates configurations one by one, and makes plans of the best of them."""
