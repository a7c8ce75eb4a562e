"""The bytes of a rank: tensors counted as they live through a step, and redistributions in progress."""
