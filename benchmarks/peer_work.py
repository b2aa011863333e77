"""Work that disttrain and transformers' Trainer share: model folder, data, run file and plan of
disttrain, and the packed rows of its first steps.

    python -m benchmarks.peer_work PART DEVICE FOLDER

Trainer reads the rows that disttrain packs, in disttrain's order, from `rows.npz`: arrays
[steps, microbatches, M, L], labels as transformers shifts them, positions [4, ...] with M-RoPE.
`work.json` holds the same steps' tokens, and the samples of each row.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.gpu.jobs import BILLION
from benchmarks.strategies import disttrain

PARTS = ("llm", "vlm", "llm_one_document")
#: Per device: sequence length, sequences of a global batch, steps.
SHAPES = {"cpu": (256, 8, 24), "cuda": (4096, 16, 8)}
#: The LLM of the preset `tiny`.
TINY = {
    "vocab_size": 272,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 352,
    "tie_word_embeddings": False,
}
#: About 1.2 billion weights over the folder of `tiny-qwen2.5-vl`.
LARGE_VLM: dict[str, Any] = {
    "vision_config": {
        "depth": 16,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 2736,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7, 11, 15],
        "out_hidden_size": 1536,
        "initializer_range": 0.02,
    },
    "text_config": {
        "vocab_size": 32000,
        "hidden_size": 1536,
        "num_hidden_layers": 20,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [16, 24, 24],
        },
        "initializer_range": 0.02,
    },
}
#: Sides of the photos in pixels, least and most.
PHOTOS = {"cpu": (128, 256), "cuda": (280, 620)}
#: `disttrain profile` with a smaller budget on a GPU, in seconds.
PROFILE = (
    "import sys; import disttrain_cli.profiling.processes as processes; processes.CUDA_S = 10.0;"
    " sys.argv = ['disttrain', 'profile']; from disttrain_cli.__main__ import main; main()"
)
LR, BETAS, EPS, CLIP = 1e-4, (0.9, 0.95), 1e-8, 1.0


def write(part: str, device: str, folder: Path) -> None:
    """Write everything that both sides read, and disttrain's profile and plan."""
    torch.manual_seed(0)
    length, batch, steps = SHAPES[device]
    model = _vlm(device, folder) if part == "vlm" else _llm(device, folder)
    _write_data(part, device, folder, length)
    run = {
        "version": 1,
        "name": "peers",
        "model": model,
        "data": {"sources": [{"path": "data"}], "sequence_length": length},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": device},
        "train": {
            "global_batch_size": batch,
            "steps": steps,
            "precision": "fp32" if device == "cpu" else "bf16",
            "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS},
            "gradient_clipping": CLIP,
        },
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    subprocess.run([sys.executable, "-c", PROFILE], cwd=folder, check=True)
    disttrain(folder, "plan")
    _write_rows(folder, steps)


def _llm(device: str, folder: Path) -> dict[str, Any]:
    from transformers import LlamaConfig

    config = LlamaConfig(**(TINY if device == "cpu" else BILLION))
    _save(config, "AutoModelForCausalLM", device, folder)
    return {"modules": {"llm": {"kind": "llm", "folder": "model"}}}


def _vlm(device: str, folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    disttrain(folder, "init", "preset", "--preset", "tiny-qwen2.5-vl")
    shutil.move(folder / "preset" / "model", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    if device != "cpu":
        for name, fields in LARGE_VLM.items():
            config[name] |= fields
        path = folder / "model" / "preprocessor_config.json"
        sizes = {"patch_size": 14, "size": {"shortest_edge": 56**2, "longest_edge": 448**2}}
        path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    _save(AutoConfig.for_model(**config), "AutoModelForImageTextToText", device, folder)
    return {"folder": "model"}


def _save(config: Any, auto: str, device: str, folder: Path) -> None:
    """Save random weights, of a large model in bf16."""
    import transformers

    with torch.device(device):
        model = getattr(transformers, auto).from_config(config)
    model.to(torch.float32 if device == "cpu" else torch.bfloat16).save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()


def _write_data(part: str, device: str, folder: Path, length: int) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]

    def text(tokens: int) -> str:
        return " ".join(draw.choices(words, k=tokens // 2))[:tokens]

    data = folder / "data"
    data.mkdir()
    if part == "vlm":
        records = [
            {
                "id": f"{number:04d}",
                "image": names,
                "conversations": [
                    {"from": "human", "value": "<image>\n" * len(names) + text(length // 16)},
                    {"from": "gpt", "value": text(draw.randint(length // 16, length // 6))},
                ],
            }
            for number, names in enumerate(_photos(data, draw, PHOTOS[device]))
        ]
        (data / "talks.json").write_text(json.dumps(records))
        return
    whole = part == "llm_one_document"
    texts = [
        text(length - 2 if whole else draw.randint(length // 16, length // 2)) for _ in range(400)
    ]
    (data / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))


def _photos(folder: Path, draw: random.Random, sides: tuple[int, int]) -> Iterator[list[str]]:
    """Write crops of scikit-learn's two photos as JPEG; the names of one or two at a time."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(160):
        names = [f"{number:04d}-{place}.jpg" for place in range(1 + number % 2)]
        for name in names:
            photo = draw.choice(photos)
            width, height = (min(draw.randint(*sides), most) for most in photo.size)
            left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
            photo.crop((left, top, left + width, top + height)).save(folder / name, quality=90)
        yield names


def _write_rows(folder: Path, steps: int) -> None:
    from disttrain_cli.data.contents import contents
    from disttrain_cli.data.index.sample_index import read_index
    from disttrain_cli.data.loader import Loader
    from disttrain_cli.data.ordering.orders import Orders
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import read_run

    run = read_run(folder / "disttrain.yaml")
    profile = Profile.model_validate_json((run.dir.root / "profile.json").read_text())
    plan = Plan.model_validate(yaml.safe_load((run.dir.root / "plan.yaml").read_text()))
    orders = Orders(run.file, plan.plan, read_index(run, profile.inputs), profile)
    (unit,) = plan.plan.units
    fields = {"tokens", "labels", "layout"}
    arrays: dict[str, list[Any]] = {name: [] for name in ("input_ids", "labels", "position_ids")}
    work: dict[str, Any] = {"microbatch": plan.plan.microbatch_size, "tokens": [], "samples": []}
    with Loader(run, orders, unit=unit.name, replica=0, fields=fields) as loader:
        for step in range(steps):
            order, batch = loader.order(step), loader.batch(step)
            work["tokens"].append(int(sum(slot.sequence_tokens.sum() for slot in order.slots)))
            work["samples"] += [
                [name.rpartition("/")[2] for name in row["names"]]
                for row in contents(order, batch, plan.plan)
            ]
            for number in range(len(order.slots)):
                slot = loader.fetch(step, number)
                assert slot.labels is not None and slot.documents is not None
                arrays["input_ids"].append(slot.token_ids)
                arrays["labels"].append(np.roll(slot.labels, 1, axis=-1))  # its last is -100
                arrays["position_ids"].append(_positions(slot.positions, slot.documents))
                loader.prefetch(step, number + 1)
    rows: dict[str, Any] = {name: np.concatenate(some, axis=-2) for name, some in arrays.items()}
    np.savez(folder / "rows.npz", **rows)
    (folder / "work.json").write_text(json.dumps(work))


def _positions(positions: Any, documents_ML: Any) -> Any:
    """Positions as transformers takes them: of a packed VLM those in the text before the three of
    M-RoPE."""
    if positions.ndim == 2:
        return positions
    begins = np.diff(documents_ML, prepend=-2, axis=-1) != 0
    at = np.arange(documents_ML.shape[-1])
    inside = at - np.maximum.accumulate(np.where(begins, at, 0), axis=-1)
    return np.concatenate([inside[None], positions])


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
