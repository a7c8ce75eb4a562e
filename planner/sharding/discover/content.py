"""A rule that was found by trial as it stands in files: in plans, and in the cache of rules."""

import json
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from planner.graph.operator_graph import WrittenRule

Position = Annotated[int, Field(ge=0, le=2**10)]
Text = Annotated[str, Field(max_length=2**14)]


class RuleContent(BaseModel):
    """The fields of `WrittenRule`, exactly; what is empty may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    text: Text
    blocked: list[Text] = []
    mean: list[Text] = []
    addends: list[Position] = []
    saves: list[tuple[Position, list[Position]]] = []
    saved_results: list[Position] = []
    saved_extra: list[tuple[Annotated[float, Field(ge=0)], Text]] = []
    scratch: list[tuple[Annotated[float, Field(ge=0)], Text]] = []
    reason: Text = ""

    def rule(self) -> WrittenRule:
        """The rule that is meant; nothing of it is checked yet."""
        return WrittenRule(
            text=self.text,
            blocked=tuple(self.blocked),
            mean=tuple(self.mean),
            addends=tuple(self.addends),
            saves=tuple((kept, tuple(needed_by)) for kept, needed_by in self.saves),
            saved_results=tuple(self.saved_results),
            saved_extra=tuple(self.saved_extra),
            scratch=tuple(self.scratch),
            reason=self.reason,
        )


def rule_content(rule: WrittenRule) -> RuleContent:
    """The content of a file for a rule."""
    return RuleContent.model_validate_json(json.dumps(asdict(rule)))
