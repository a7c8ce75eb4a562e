"""Bucket elimination over tables of numbers: the order, the messages, the multiplier, the fronts."""
