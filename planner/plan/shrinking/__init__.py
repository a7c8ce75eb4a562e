"""The smallest plan that decides what a large one decides, and which of its decisions are in it."""
