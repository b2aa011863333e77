"""The run file of a Llama of any width and depth, for benchmarks of the engine alone: its data are
never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

VOCABULARY = 512


def write_run(folder: Path, width: int, blocks: int, length: int, train: dict[str, Any]) -> Path:
    """Write it, with the section `train` as given."""
    llm = {
        "kind": "llm",
        "architecture": "llama",
        "config": {
            "hidden_size": width,
            "num_hidden_layers": blocks,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 3 * width,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": length,
        },
    }
    content = {
        "name": "benchmark",
        "model": {"modules": {"llm": llm}},
        "data": {"sources": [{"path": "."}], "sequence_length": length},
        "cluster": {"device": "cpu"},
        "train": train,
    }
    path = folder / "disttrain.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
