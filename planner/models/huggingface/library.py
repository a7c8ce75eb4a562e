"""The library transformers: loaded, with each of its errors as one of ours, and what its configs say of the part that
reads tokens."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import ModelError


def transformers_library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "a config.json is built by Hugging Face's transformers, which cannot be imported"
            f" ({error}); pip install 'parallel-planner[huggingface]'"
        ) from error
    return transformers


@contextlib.contextmanager
def errors_named(transformers: Any, what: str) -> Iterator[None]:
    """Runs transformers on a user's config: without output, and with each of its errors as a ModelError.

    All of its errors: it may raise anything (KeyError, AttributeError, RuntimeError of torch, its own errors that
    have no common base), and no code of the planner runs inside.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        raise ModelError(f"{what}: {_one_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def _one_line(error: Exception) -> str:
    """An error as one line, with its type where its text alone does not say it."""
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    return text if kind in ("ValueError", "OSError") and text else f"{kind}: {text}" if text else kind


def text_of(config: Any, path: Path) -> Any:
    """The config of the part that reads tokens, where a config has several parts; else the config itself."""
    with errors_named(transformers_library(), f"{path}: transformers cannot tell which part of it reads tokens"):
        return config.get_text_config()


def has_window(config: Any, length: int | None = None) -> bool:
    """Whether some layer looks back through a window, or sees only its own chunk (Llama 4), that is shorter than a
    sequence of this length."""
    windows = [int(getattr(config, name, None) or 0) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None)
    used = kinds is None or any(kind != "full_attention" for kind in kinds)
    return used and any(window > 0 and (length is None or window < length) for window in windows)
