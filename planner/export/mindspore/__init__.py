"""MindSpore, whose operators take strategies one by one, and MindSpore Transformers (MindFormers)."""
