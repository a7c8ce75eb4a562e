"""Plans for decisions that leave nothing to search, as other engines have them."""
