"""A plan as one HTML page that needs no network."""

from planner.report.html.page import page

__all__ = ["page"]
