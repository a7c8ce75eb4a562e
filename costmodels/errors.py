"""What a cost formula refuses: an unknown word, or a number outside its range. It never guesses a cost."""


class CostModelError(ValueError):
    """An input that no formula of this package covers; the message names it and what would be accepted."""
