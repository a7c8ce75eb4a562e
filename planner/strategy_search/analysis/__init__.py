"""What would be best if something were otherwise."""
