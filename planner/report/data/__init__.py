"""The content of a plan's page as plain data: derived once from a bound plan and its machine, drawn elsewhere."""

from planner.report.data.choices import Choice, Choices, Reason, reasons_of
from planner.report.data.report import Report, Reported, report_of

__all__ = ["Choice", "Choices", "Reason", "Report", "Reported", "reasons_of", "report_of"]
