"""What all answers have in common."""

from pydantic import BaseModel, ConfigDict

Text = str | None
Number = float | None


class Strict(BaseModel):
    """No key is left out, none is too many."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
