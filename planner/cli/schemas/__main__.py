"""Writes the JSON Schema of all answers to a file."""

import sys
from pathlib import Path

from planner.cli.schemas import json_schema

if len(sys.argv) != 2:
    sys.exit("give the file to write: python -m planner.cli.schemas docs/json-schema.json")
Path(sys.argv[1]).write_text(json_schema(), encoding="utf-8")
