"""Writes the JSON Schema of all answers to a file."""

import sys
from pathlib import Path

from planner.cli.schemas import json_schema

Path(sys.argv[1]).write_text(json_schema(), encoding="utf-8")
