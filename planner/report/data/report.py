"""The whole content of a plan's page."""

from dataclasses import dataclass

from hardware_profiles import Machine
from planner.plan.binding.bind import BoundPlan
from planner.plan.compare.dissection import dissect
from planner.plan.layout.roles import roles
from planner.plan.plan import Prediction
from planner.plan.prediction.timeline import StepTimeline, timeline_of
from planner.report.command import command_of
from planner.report.data.choices import Choices
from planner.report.data.hosts import Hosts, hosts_of
from planner.report.data.inside import Inside, inside_of
from planner.report.data.lanes import Lanes, lanes_of
from planner.report.data.memory import Memory, memory_of
from planner.report.data.model import Model, model_of
from planner.report.data.network import Network, network_of
from planner.report.data.spending import Spending, busiest_of, spending_of
from planner.report.data.trust import Trust, trust_of
from planner.report.rows import Rows, degree_rows, figure_rows, job_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan for people. `job` is the job, `degrees` and `figures` are the rows of the terminal
    (`planner.report.rows`), `remarks` are sentences to read first; `command` plans the same job. `choices` is None if
    no other plans were searched."""

    model: str
    job: str
    details: str
    command: str
    degrees: Rows
    figures: Rows
    remarks: tuple[str, ...]
    prediction: Prediction
    lanes: Lanes
    memory: Memory
    spending: Spending
    shape: Model
    network: Network
    hosts: Hosts
    trust: Trust
    choices: Choices | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A report, the full timeline, and the content of its spans, rank by rank, for traces."""

    report: Report
    timeline: StepTimeline
    inside: tuple[Inside, ...]


def report_of(
    bound: BoundPlan,
    prediction: Prediction,
    cluster: Machine,
    *,
    remarks: tuple[str, ...] = (),
    choices: Choices | None = None,
    bill: Rows = (),
) -> Reported:
    """The report of a bound plan that was priced on a machine; `bill` is the cost of training with it
    (`planner.report.data.bill`)."""
    plan = bound.plan
    ranks = dissect(bound, cluster)
    costs = [rank.cost for rank in ranks]
    timeline, busiest = timeline_of(plan, costs), busiest_of(plan, costs)
    job, details = job_text(plan)
    report = Report(
        model=plan.model.reference,
        job=job,
        details=details,
        command=command_of(plan),
        degrees=degree_rows(plan, roles(bound)),
        figures=(*figure_rows(plan, prediction), *bill),
        remarks=remarks,
        prediction=prediction,
        lanes=lanes_of(timeline),
        memory=memory_of(plan, ranks, timeline, cluster),
        spending=spending_of(bound, prediction, ranks[busiest], busiest),
        shape=model_of(bound, ranks),
        network=network_of(bound, ranks[busiest], busiest, cluster),
        hosts=hosts_of(plan, cluster),
        trust=trust_of(bound, prediction, cluster),
        choices=choices,
    )
    return Reported(report=report, timeline=timeline, inside=inside_of(bound, ranks, cluster))
