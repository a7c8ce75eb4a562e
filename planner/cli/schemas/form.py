"""The base class of all answers."""

from pydantic import BaseModel, ConfigDict

Text = str | None
Number = float | None


class Strict(BaseModel):
    """An answer whose keys are exactly the declared ones. Seconds and bytes are plain numbers, without NaN or
    infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
