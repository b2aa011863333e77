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

IMAGE = "<|image_pad|>"


class Rows(torch.utils.data.Dataset):
    """Packed rows: of texts, tokens; of conversations, what chat template, tokenizer and image
    processor give when the row is asked for."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "rows.npz") as arrays:
            self._rows = {name: torch.from_numpy(arrays[name]) for name in arrays}
        self._data = folder / "data"
        self._samples = json.loads((folder / "work.json").read_text())["samples"]
        self.talks = self._rows["position_ids"].ndim == 3
        if self.talks:
            records = json.loads((self._data / "talks.json").read_text())
            self._records = {record["id"]: record for record in records}
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
            self._images = transformers.AutoImageProcessor.from_pretrained(folder / "model")
        # one document per row: causal attention needs neither positions nor a mask
        elif int((self._rows["position_ids"] == 0).sum()) == len(self):
            del self._rows["position_ids"]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = {name: array[..., row, :] for name, array in self._rows.items()}
        return item | self._processed(row, item["input_ids"]) if self.talks else item

    def _processed(self, row: int, packed: torch.Tensor) -> dict[str, Any]:
        """A row's tokens and images, as Qwen's processor makes them without torchvision."""
        records = [self._records[name] for name in self._samples[row]]
        opened = [
            Image.open(self._data / name).convert("RGB")
            for record in records
            for name in record["image"]
        ]
        images = dict(self._images(opened, return_tensors="pt"))
        texts = [self._text(record["conversations"]) for record in records]
        ids = torch.tensor([one for text in texts for one in self._tokenizer(text)["input_ids"]])
        image = self._tokenizer.convert_tokens_to_ids(IMAGE)
        counts = torch.ones_like(ids)
        counts[ids == image] = images["image_grid_thw"].prod(-1) // self._images.merge_size**2
        ids = ids.repeat_interleave(counts)
        if not torch.equal(ids, packed[: len(ids)]):
            raise ValueError(f"row {row}: other tokens than disttrain's")
        return images | {"input_ids": torch.cat([ids, packed[len(ids) :]])}

    def _text(self, turns: list[dict[str, str]]) -> str:
        roles = {"human": "user", "gpt": "assistant"}
        messages = [
            {
                "role": roles[turn["from"]],
                "content": turn["value"].replace(
                    "<image>\n", f"<|vision_start|>{IMAGE}<|vision_end|>"
                ),
            }
            for turn in turns
        ]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))


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
    auto = "AutoModelForImageTextToText" if rows.talks else "AutoModelForCausalLM"
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
