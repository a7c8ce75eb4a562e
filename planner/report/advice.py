"""Advice on what would make a plan fit, in words with its cost."""

from planner.report.units import digits_text, seconds_text


def advice_text(change: str, seconds: float | None, samples: float | None, tokens: float | None, devices: int) -> str:
    """`--zero 1 (31.2 s a step, 1,020 tokens/s per device)`: a change, and the best plan found with it."""
    if seconds is None or samples is None:
        return change
    rate = f"{digits_text(samples / devices)} samples/s" if tokens is None else f"{tokens / devices:,.0f} tokens/s"
    cost = f"{seconds_text(seconds)} a step, {rate} per device"
    return f"{change[:-1]}; {cost})" if change.endswith(")") else f"{change} ({cost})"
