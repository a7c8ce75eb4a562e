"""The error of a cost formula: an unknown word, or a number outside its range. A formula never guesses a cost."""


class CostModelError(ValueError):
    """An input that no formula of this package covers. The message names it and says what is accepted."""
