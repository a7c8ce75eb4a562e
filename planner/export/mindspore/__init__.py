"""MindSpore, which takes a strategy for each operator, and MindSpore Transformers (MindFormers)."""
