"""The cost of training on a number of tokens: days, device-hours and money, without failures.

    steps = tokens / (global batch x sequence length)        days = steps x seconds of a step / 86400

`plan compare --failures` counts failures, restarts and checkpoints too.
"""

from collections.abc import Callable

from costmodels.goodput import DAY
from hardware_profiles import Seconds
from planner.errors import RequestError
from planner.plan.plan import Plan, Prediction
from planner.report.rows import Rows
from planner.report.units import count_text


def bill_rows(plan: Plan, prediction: Prediction, tokens: float, price: float | None) -> Rows:
    """Rows for the figures of a plan, with the interval of its step if known. `price` is money per device-hour. Raises
    RequestError for a model without sequences."""
    length = plan.model.sequence_length
    if not length:
        raise RequestError(f"--tokens: {plan.model.reference} has no sequences; leave it out")
    steps = tokens / (plan.training.global_batch * length)
    hours = plan.cluster.devices / 3600

    def text(of: Callable[[Seconds], float], form: str) -> str:
        ends = [prediction.low_seconds, prediction.high_seconds]
        known = [of(steps * end) for end in ends if end is not None and end > 0]
        between = f" ({known[0]:{form}} to {known[1]:{form}})" if len(known) == 2 else ""
        return f"{of(steps * prediction.step_seconds):{form}}{between}"

    rows = [
        (f"days for {count_text(tokens)} tokens", text(lambda seconds: seconds / DAY, ",.1f")),
        ("device-hours", text(lambda seconds: seconds * hours, ",.0f")),
    ]
    if price is not None:
        rows.append((f"cost at {price:g} a device-hour", text(lambda seconds: seconds * hours * price, ",.0f")))
    return tuple(rows)
