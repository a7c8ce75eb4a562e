"""Rules on disk, so that an operator is searched once and then only proved.

    FOLDER/rule-<digest of operator, call, versions, source>.json

A file is data: JSON of exactly these keys, read without following links and only up to a size; nothing in it is ever
executed. It is not believed either. It must say which call, which version of torch and which source of the operator it
is for, and its rule is proved again by execution each time it is read. Whatever fails is reported, searched anew and
written over, so that a file that is broken, old, or was put there by somebody else costs time and changes no result.
Files are written whole or not at all; of several writers the last one wins.
"""

import hashlib
import inspect
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from pydantic import BaseModel, ConfigDict, Field

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import WrittenRule
from planner.graph.written import call_text
from planner.sharding.discover.content import RuleContent, rule_content
from planner.sharding.discover.find import check_rule, kept_again, rule_by_trial

SCHEMA_VERSION = 1
LARGEST = 2**18  # bytes of a file


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    call: str
    torch: str
    source: str
    rule: RuleContent


def cached(call: Call, folder: Path, on_note: Callable[[str], None]) -> WrittenRule:
    """The rule of a call: that of the folder, if it holds, else one found by trial, which the folder then keeps."""
    key = _key(call)
    path = folder / f"rule-{hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:32]}.json"
    rule = _read(path, call, key, on_note)
    if rule is None:
        rule = rule_by_trial(call)
        _write(path, _File(schema_version=SCHEMA_VERSION, rule=rule_content(rule), **key), on_note)
    return rule


def _key(call: Call) -> dict[str, str]:
    return {"call": call_text(call), "torch": torch.__version__, "source": _source(call.op)}


def _source(op: str) -> str:
    """Digest of the Python source that implements an operator of the user's; empty where there is none to be had."""
    namespace, name, _ = op.split(".")
    definition: Any = torch._library.custom_ops.OPDEFS.get(f"{namespace}::{name}")
    if definition is None:
        return ""
    parts = (definition._init_fn, definition._abstract_fn, definition._backward_fn, definition._setup_context_fn)
    try:
        text = "".join(inspect.getsource(part) for part in parts if part is not None)
    except (OSError, TypeError):  # made in a prompt, or by a compiled function
        return ""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, call: Call, key: dict[str, str], on_note: Callable[[str], None]) -> WrittenRule | None:
    """The rule in a file, proved; None where there is no file, or, with a note, where it is not to be used."""
    try:
        text = _text(path)
        if text is None:
            return None
        file = _File.model_validate_json(text)
        wrong = [name for name, value in key.items() if getattr(file, name) != value]
        if wrong:
            raise RuleError(f"it is for another {wrong[0]}")
        rule = file.rule.rule()
        why = check_rule(call, rule)
        if why:
            raise RuleError(why)
        if kept_again(call, rule) != rule:
            raise RuleError("autograd keeps other tensors than it says")
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
    except (RuleError, ValueError, OSError) as error:
        reason = str(error)
    else:
        return rule
    on_note(f"{path}: this rule is not used, it is searched anew: {reason}")
    return None


def _text(path: Path) -> str | None:
    """The content of a file that is a plain one and not too large; None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no plain file")
        content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST} bytes")
    return content.decode("utf-8")


def _write(path: Path, file: _File, on_note: Callable[[str], None]) -> None:
    """Write a file whole or not at all. A folder that cannot be written to is only reported."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".rule-", delete=False, encoding="utf-8") as made:
            temporary = made.name
            made.write(file.model_dump_json(indent=1) + "\n")
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        on_note(f"{path}: the rule cannot be kept: {error.strerror}")
    finally:
        if temporary is not None:
            os.unlink(temporary)
