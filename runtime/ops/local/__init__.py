"""Local forms: how one device computes its part of an operator."""
