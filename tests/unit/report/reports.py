"""Reports of plans for small models."""

from functools import cache

from planner.plan.compare.verify import Verdict
from planner.report.data import Choice, Choices, Reported, reasons_of, report_of
from tests.unit.plan.plans import plan_named, verdict_of
from tests.unit.search.cases import cluster_of


@cache
def verdict_named(name: str) -> Verdict:
    return verdict_of(plan_named(name))


@cache
def reported(name: str) -> Reported:
    """The report of a plan of `tests.unit.plan.plans`, among three others."""
    verdict = verdict_named(name)
    plan, figures = verdict.bound.plan, verdict.prediction
    cluster = cluster_of(plan.cluster.profile, plan.cluster.devices)
    this = Choice(
        step_seconds=figures.step_seconds,
        peak_bytes=figures.peak_bytes,
        words=(("degrees", "this"), ("ZeRO", "3")),
        this=True,
    )
    lean = Choice(
        step_seconds=2 * figures.step_seconds, peak_bytes=1.0, words=(("degrees", "lean <script>"), ("ZeRO", "3"))
    )
    slow = Choice(step_seconds=3 * figures.step_seconds, peak_bytes=0.5, words=(("degrees", "slow"), ("ZeRO", "3")))
    near = Choice(
        step_seconds=4 * figures.step_seconds,
        peak_bytes=0.4,
        words=(("degrees", "this"), ("ZeRO", "3")),
        name="FSDP <b>",
    )
    reasons = reasons_of(this, (lean, slow, near), [("ZeRO", "0")])
    choices = Choices(plans=(this, lean, slow, near), note="Four plans.", reasons=reasons)
    return report_of(verdict.bound, figures, cluster, choices=choices)
