"""What every part is given: a device, a folder of its own, and a place for its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.whole import write_whole

Figures = dict[str, Any]


@dataclass
class Setting:
    """One part's surroundings. On a CPU everything is tiny: that shows that it runs, and measures
    nothing."""

    kind: str  # "cuda" or "cpu"
    folder: Path
    out: Path  # where the part's figures go, as they come
    figures: Figures = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def small(self) -> bool:
        return self.kind == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    def tell(self, name: str, found: Any) -> None:
        """Keep a figure, so that it stays if what comes after it fails."""
        self.figures[name] = found
        write_whole(self.out, json.dumps(self.figures))

    def run_of(self, preset: str, changes: Mapping[str, Any] | None = None) -> Run:
        """The run of a preset in this part's folder, with fields changed; the tiny preset's on a
        CPU."""
        name = "tiny" if self.small else preset
        text = (files("disttrain_cli") / "templates" / "presets" / f"{name}.yaml").read_text()
        path = self.folder / "disttrain.yaml"
        path.write_text(
            yaml.safe_dump(_merged(yaml.safe_load(text), changes or {}), sort_keys=False)
        )
        return read_run(path)


def _merged(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **known,
        **{
            key: _merged(known[key], value)
            if isinstance(value, dict) and isinstance(known.get(key), dict)
            else value
            for key, value in changes.items()
        },
    }
