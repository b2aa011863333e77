"""What a first look at a GPU is to reach, beside what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLOCK_MFU = 0.55  # a block of 8,192 tokens in bf16, of the dense peak
MODEL_MFU = 0.50
MEMORY_ERROR = 0.05  # of a step's peak, either way from the plan's
STEP_ERROR = 0.05  # of a step, either way from what the device's own profile says


def aims(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each aim, what was measured, and whether it was reached; None where nothing was measured."""
    figures = {name: part.get("figures", {}) for name, part in parts.items()}
    rows = [
        *((name, "mfu", BLOCK_MFU, _at(figures, name, "one_document", "mfu")) for name in _BLOCKS),
        ("large", "mfu", MODEL_MFU, _at(figures, "large", "train", "mfu")),
        *(
            row
            for part in ("large", "multimodal")
            for row in (
                (part, "memory_error", MEMORY_ERROR, _memory_error(figures, part)),
                (part, "step_error", STEP_ERROR, _step_error(figures, part)),
            )
        ),
    ]
    return [
        {
            "part": part,
            "figure": figure,
            "aim": f"{'at least' if figure == 'mfu' else 'at most'} {aim:g}",
            "measured": measured,
            "reached": None
            if measured is None
            else measured >= aim
            if figure == "mfu"
            else measured <= aim,
        }
        for part, figure, aim, measured in rows
    ]


_BLOCKS = ("block_7b", "block_70b")


def _step_error(figures: Mapping[str, Any], part: str) -> float | None:
    error = _at(figures, part, "prediction", "error")
    return None if error is None else abs(error)


def _memory_error(figures: Mapping[str, Any], part: str) -> float | None:
    measured, planned = (
        _at(figures, part, "train", "memory_gib"),
        _at(figures, part, "planned", "peak_gib"),
    )
    return None if measured is None or planned is None else abs(measured / max(planned) - 1.0)


def _at(figures: Any, *keys: str) -> Any:
    """What lies under these keys, None where one is missing."""
    for key in keys:
        figures = (figures or {}).get(key)
    return figures
