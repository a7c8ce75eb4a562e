"""What the page of `plan ui` loads: its own files, and a plan as a file, as a report and as settings of an engine."""

import io
import re
import zipfile
from importlib import resources
from typing import Any

from planner.errors import RequestError
from planner.plan.binding.machine import machine_of
from planner.ui.jobs import Job


def asset(name: str) -> bytes:
    package = "planner.report.html" if name == "style.css" else "planner.ui"
    return resources.files(package).joinpath("assets", name).read_bytes()


def bound_of(job: Job) -> Any:
    """The plan of a search, bound. Raises RequestError before there is one."""
    if job.shown is None:
        raise RequestError("there is no plan yet")
    return job.shown.bound


def stem(job: Job) -> str:
    plan = bound_of(job).plan
    return re.sub(r"[^\w]+", "-", f"{plan.model.reference}-{plan.cluster.devices}", flags=re.ASCII).strip("-")


def report(job: Job) -> bytes:
    from planner.report.data import report_of
    from planner.report.html import page

    bound = bound_of(job)
    return page(report_of(bound, bound.plan.prediction, machine_of(bound.plan.cluster)).report).encode()


def settings(job: Job, engine: str) -> bytes:
    """The files of an engine as a zip, with a list of what it cannot be told."""
    from planner.api.plans import export

    found = export(bound_of(job).plan, engine, nearest=True)
    lost = "".join(f"{what}: {here} becomes {there}\n" for what, here, there in found.given_up)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**found.files, "GIVEN-UP.txt": lost or "nothing\n"}.items():
            archive.writestr(zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0)), text)
    return buffer.getvalue()
