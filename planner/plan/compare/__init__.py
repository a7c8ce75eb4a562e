"""Plans beside each other: verified, priced again, their differences and alternatives."""
