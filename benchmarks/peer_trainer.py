"""Training with transformers' Trainer as its user writes it, on the rows of `benchmarks.peer_work`.

    python -m benchmarks.peer_trainer FOLDER DEVICE ATTENTION COMPILE STEPS_FILE MICROBATCH

A line of STEPS_FILE per step, once its loss is known: loss and peak memory of the device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peer_work import BETAS, CLIP, EPS, LR, SHAPES


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Packed rows; images are read and processed when their row is asked for."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "rows.npz") as arrays:
            self._rows = {name: torch.from_numpy(arrays[name]) for name in arrays}
        self._data = folder / "data"
        self._images = json.loads((folder / "work.json").read_text())["images"]
        starts = (self._rows["position_ids"] == 0).all(0) if self.mrope else None
        # one document per row: causal attention needs neither positions nor a mask
        if starts is None and int((self._rows["position_ids"] == 0).sum()) == len(self):
            del self._rows["position_ids"]
        self._processor = (
            transformers.AutoImageProcessor.from_pretrained(folder / "model")
            if self.mrope
            else None
        )

    @property
    def mrope(self) -> bool:
        """True if rows hold the positions of M-RoPE, as those of a VLM."""
        return "position_ids" in self._rows and self._rows["position_ids"].ndim == 3

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = {name: array[..., row, :] for name, array in self._rows.items()}
        if self._processor is None:
            return item
        opened = [Image.open(self._data / name).convert("RGB") for name in self._images[row]]
        return item | dict(self._processor(opened, return_tensors="pt"))


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A microbatch [M, L], positions [M, L] or [4, M, L], images of all rows in order."""
    together = {"pixel_values": torch.cat, "image_grid_thw": torch.cat}
    return {
        name: together[name]([row[name] for row in rows])
        if name in together
        else torch.stack([row[name] for row in rows], dim=-2)
        for name in rows[0]
    }


class Report(TrainerCallback):
    """Appends a line to a file after every step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Called with a step's loss, which waits for the device; at the end without one."""
        if "loss" in logs:
            cuda = torch.cuda.is_available()
            held = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            row = {"step": state.global_step - 1, "loss": logs["loss"], "memory_gib": held}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    folder, device, attention, compiled, out, microbatch = sys.argv[1:]
    cuda, (_, batch, steps) = device == "cuda", SHAPES[device]
    rows = Rows(Path(folder))
    auto = "AutoModelForImageTextToText" if rows.mrope else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_pretrained(
        Path(folder) / "model", dtype=torch.float32, attn_implementation=attention
    )
    # Trainer sets use_cache of the outer config alone; with a cache packed rows get no mask
    model.config.get_text_config().use_cache = False
    arguments = TrainingArguments(
        output_dir=str(Path(folder) / "trainer"),
        per_device_train_batch_size=int(microbatch),
        gradient_accumulation_steps=batch // int(microbatch),
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=CLIP,
        bf16=cuda,
        use_cpu=not cuda,
        torch_compile=compiled == "compiled",
        dataloader_num_workers=4 if cuda else 0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=collate,
        callbacks=[Report(Path(out))],
    ).train()


if __name__ == "__main__":
    main()
