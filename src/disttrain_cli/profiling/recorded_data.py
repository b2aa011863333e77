"""Replacement of a profile's data statistics by a run's recorded data, where they have drifted.

A trace holds the sizes of a few sequences of every step. Where they differ from the profile's by no
more than chance, the profile's figures stay: they are of the whole dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.data.drift import RECENT_STEPS, Drift, drift, of_last_phase
from disttrain_cli.data.sizes import Sizes, sizes_of_sample
from disttrain_cli.data.statistics import SAMPLED_SEQUENCES, distribution
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import DataProfile, Profile, SizeSample
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

#: Fewer sequences are too small a sample of the data.
LEAST_SEQUENCES = 64
LAST = "SELECT * FROM sizes WHERE step > (SELECT max(step) FROM sizes) - $steps ORDER BY step"


def recorded_data(database: Database, profile: Profile) -> tuple[SizeSample | None, list[Drift]]:
    """Return sizes of the sequences of the last steps, and the drifts that they show.

    The sizes are None where there are too few sequences.
    """
    rows = of_last_phase(profile, database.sql(LAST, {"steps": RECENT_STEPS}))
    if len(rows) < LEAST_SEQUENCES:
        return None, []
    chosen = [
        rows[index]
        for index in np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_SEQUENCES)).astype(int)
    ]
    sample = SizeSample(
        tokens=[row["tokens"] for row in chosen],
        length_sq=[row["length_sq"] for row in chosen],
        images=[list(row["images"]) for row in chosen],
        targets=[row["targets"] for row in chosen],
        clips=[row["clips"] for row in chosen] if any(row["clips"] for row in chosen) else [],
    )
    return sample, drift(profile, [_sums(rows), _sums(rows)], sample)


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sums over all rows as one step of `data.drift`."""
    return {
        "step": int(rows[0]["step"]),
        "sequences": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "images": sum(len(row["images"]) for row in rows),
        "targets": sum(row["targets"] for row in rows),
    }


def with_data(profile: Profile, run: Run, sample: SizeSample) -> Profile:
    """Return the profile for data with these sizes.

    The largest work in a sequence is never less than in the old profile. The dataset stays the
    same: its number of sequences, its fingerprint.
    """
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.profiling.rows import cut_bytes

    sample = sample.sized_as(profile.data.sample)
    sizes, table = sizes_of_sample(sample), layer_table(run)
    work = sizes.work(profile.inputs)
    mean = {name: Work(*rows.mean(axis=0).tolist()) for name, rows in work.items()}
    value_bytes = 2 if profile.precision == "bf16" else 4
    modules = {
        name: module.model_copy(
            update={
                "work_per_sequence": mean[name],
                "max_work_per_sequence": Work(
                    *np.maximum(module.max_work_per_sequence, work[name].max(axis=0)).tolist()
                ),
                "cut_bytes_per_sequence": cut_bytes(name, table, profile.inputs, mean, value_bytes),
            }
        )
        for name, module in profile.modules.items()
    }
    data = _described(profile.data, profile.inputs, sizes).model_copy(update={"sample": sample})
    return profile.model_copy(update={"modules": modules, "data": data})


def _described(data: DataProfile, inputs: ModelInputs, sizes: Sizes) -> DataProfile:
    """Return the dataset's statistics if all its sequences are like these."""

    def of_all(per_sequence: float) -> int:
        return round(data.sequences * per_sequence)

    def tokens_of(item: Item) -> float:
        """Return LLM tokens per sequence."""
        head, area = inputs.of(item)[0], sizes.items[item].area
        return float(head.rows("tokens").of(head.size(area)).sum()) / len(sizes)

    encoded = {head.item: tokens_of(head.item) for head in inputs.heads if head.item != "target"}
    counts = {item: items.counts for item, items in sizes.items.items()}
    tokens = sizes.tokens.mean()
    return data.model_copy(
        update={
            "text_tokens": of_all(max(0.0, tokens - sum(encoded.values()))),
            "image_tokens": of_all(encoded.get("image", 0.0)),
            "images": of_all(counts["image"].mean()),
            "targets": of_all(counts["target"].mean()),
            "clips": of_all(counts["audio"].mean()),
            "fill_fraction": min(1.0, tokens / inputs.sequence_length),
            "images_per_sequence": distribution(counts["image"]),
        }
    )
