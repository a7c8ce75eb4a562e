"""JSON models of everything that `--json` prints, by command. Answers are checked against them as they are written,
except the lines of `plan run`.

    python -m planner.cli.schemas docs/json-schema.json     writes the JSON Schema of all of them
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from planner.cli.schemas.comparisons import (
    Advised,
    Audit,
    Cases,
    Compared,
    ComparedEngines,
    Diff,
    Enough,
    Explained,
    ExplainedNames,
    Proved,
    Replanned,
    Reported,
    Validated,
)
from planner.cli.schemas.errors import Refused
from planner.cli.schemas.lists import Calibrated, Corrected, Fitted, Model, Models, Profile, Profiles, Stack, Stacks
from planner.cli.schemas.plans import (
    Answer,
    Exported,
    ExportedOperators,
    Imported,
    Repriced,
    Shown,
    ShownRank,
    Verified,
)
from planner.cli.schemas.runs import Adopted, Inspected, Run, VerifiedCheckpoint, Written

__all__ = ["ANSWERS", "answer_text", "json_schema"]

ANSWERS: dict[str, type[BaseModel]] = {
    "plan": Answer,
    "plan search": Answer,
    "plan estimate": Answer,
    "plan estimate PLAN": Repriced,
    "plan manual": Repriced,
    "plan compare": Compared,
    "plan compare --model": Cases,
    "plan capacity": Enough,
    "plan advise": Advised,
    "plan compare ENGINES": ComparedEngines,
    "plan diff": Diff,
    "plan explain PLAN": Explained,
    "plan explain PLAN NAME": ExplainedNames,
    "plan show": Shown,
    "plan show --rank": ShownRank,
    "plan verify": Verified,
    "plan audit": Audit,
    "plan prove": Proved,
    "plan validate": Validated,
    "plan run": Run,
    "plan models": Models,
    "plan models NAME": Model,
    "plan profiles": Profiles,
    "plan profiles NAME": Profile,
    "plan profiles NAME --fit": Fitted,
    "plan export": Exported,
    "plan export OPERATORS": ExportedOperators,
    "plan import": Imported,
    "plan report": Reported,
    "plan stacks": Stacks,
    "plan stacks NAME": Stack,
    "plan calibrate": Calibrated,
    "plan fit": Calibrated,
    "plan fit RUN": Corrected,
    "plan replan": Replanned,
    "plan checkpoint adopt": Adopted,
    "plan checkpoint inspect": Inspected,
    "plan checkpoint verify": VerifiedCheckpoint,
    "plan checkpoint convert": Written,
    "plan checkpoint merge": Written,
    "error": Refused,
}


def answer_text(command: str, content: Mapping[str, Any], *, indent: int | None = 1) -> str:
    """An answer as JSON. Raises pydantic.ValidationError if it does not match its model, which is a fault of ours."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    ANSWERS[command].model_validate_json(text)
    return text


def json_schema() -> str:
    """The JSON Schema of the answer of each command, with the shared definitions."""
    known = set(ANSWERS.values())
    ordered = sorted(known, key=lambda model: model.__name__)
    places, shared = models_json_schema([(model, "serialization") for model in ordered])
    answers = {name: places[model, "serialization"] for name, model in ANSWERS.items()}
    return json.dumps({"answers": answers, **shared}, indent=1, sort_keys=True) + "\n"
