"""What tests of models share."""

import pytest

from planner.models.huggingface import from_config


@pytest.fixture
def whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a config keep weights that hold several matrices as transformers has them, whose own code reads
    them."""
    monkeypatch.setattr(from_config, "take_apart", lambda module: None)
