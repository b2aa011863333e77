"""Tiny Qwen-VL folders that read videos, and what transformers makes of conversations with them.

Its video processors need torchvision, so their pure functions are taken from their sources:
sampling and `smart_resize`. Frames are resized by PIL, as the data do.
"""

import ast
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.data.films import all_frames
from tests.whole_models import rewritten, write_qwen

SPECIAL = (
    *("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
START, END, IMAGE, VIDEO = (SPECIAL.index(name) for name in SPECIAL[-4:])
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>"
    "{% endgeneration %}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, BLOCK = 4, 8
RULES = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl"}
#: Of the folders' video processors.
NUMBERS = {
    "qwen2_5_vl": {"size": {"shortest_edge": 256, "longest_edge": 1024}},
    "qwen3_vl": {"size": {"shortest_edge": 256, "longest_edge": 6144}},
}


def tokenizer() -> Any:
    """A byte-level tokenizer with the special tokens of these models."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: place for place, name in enumerate((*SPECIAL, *letters))}
    rules = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    rules.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=rules, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>"
    )
    made.chat_template = TEMPLATE
    return made


def write_folder(folder: Path, family: str) -> Any:
    """A folder of a family that reads videos; returns its model."""
    import json

    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    model = write_qwen(folder, family)
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    for name, number in ids.items():
        setattr(model.config, name, number)
    rewritten(folder, **ids)
    tokenizer().save_pretrained(folder)
    own = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, **NUMBERS[family]}
    own |= {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}  # as for its images
    (folder / "video_preprocessor_config.json").write_text(json.dumps(own))
    return model


def published(family: str, name: str) -> Any:
    """A function of a family's video processor, by name."""
    import transformers

    rule = RULES[family]
    path = Path(transformers.__file__).parent / "models" / rule / f"video_processing_{rule}.py"
    tree = ast.parse(path.read_text())
    node = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    space: dict[str, Any] = {"math": math, "torch": torch, "np": np}
    exec(compile(ast.Module([node], []), str(path), "exec"), space)
    return space[name]


class Film:
    """A video as transformers' processors see it."""

    def __init__(self, family: str, data: bytes, fps: float = 2.0) -> None:
        import av
        from transformers.video_utils import VideoMetadata

        frames = all_frames(data)
        with av.open(io.BytesIO(data)) as container:
            rate = float(container.streams.video[0].average_rate)
        own = SimpleNamespace(
            num_frames=None, fps=fps, temporal_patch_size=2, min_frames=4, max_frames=768
        )
        self.metadata = VideoMetadata(total_num_frames=len(frames), fps=rate)
        indices = published(family, "sample_frames")(own, self.metadata)
        self.metadata.frames_indices = indices = [int(index) for index in indices]
        seen = [frames[index] for index in indices]
        seen += seen[-1:] * (len(seen) % 2)
        height, width = frames[0].shape[:2]
        size = NUMBERS[family]["size"]
        budget = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        if family == "qwen3_vl":
            budget |= {"num_frames": len(indices)}
        rows, columns = published(family, "smart_resize")(
            height=height, width=width, factor=BLOCK, **budget
        )
        resized = [
            np.asarray(Image.fromarray(one).resize((columns, rows), Image.Resampling.BICUBIC))
            for one in seen
        ]
        self.pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)  # [T, C, H, W]
        self.grid = [len(seen) // 2, rows // PATCH, columns // PATCH]
        self.seconds_per_grid = 2 / self.metadata.sampled_fps

    def replacement(self, family: str) -> str:
        """What the processor writes in the place of the video's placeholder."""
        if family == "qwen2_5_vl":
            return "<|video_pad|>" * (math.prod(self.grid) // 4)
        from transformers import Qwen3VLProcessor

        own = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
            video_token="<|video_pad|>",
            _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(
                None, *given
            ),
        )
        grids = {"video_grid_thw": torch.tensor([self.grid]), "video_metadata": [self.metadata]}
        return str(Qwen3VLProcessor.replace_video_token(own, grids, 0))

    def patches(self, mean: Any, std: Any) -> Tensor:
        """[P, …] as `patchify` lays them out, normalised."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (mean, std))
        frames = (self.pixels / 255 - mean) / std
        time, channels, height, width = frames.shape
        shape = (time // 2, 2, channels, height // 8, 2, 4, width // 8, 2, 4)
        return frames.view(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(4).flatten(0, 3)


class Talk:
    """A conversation as transformers' own processor writes it."""

    def __init__(self, family: str, messages: list[dict[str, Any]], films: list[bytes]) -> None:
        words = tokenizer()
        self.films = [Film(family, data) for data in films]
        made = words.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, trained, each = list[int](), list[int](), iter(self.films)
        for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True):
            written = (
                words(next(each).replacement(family), add_special_tokens=False)["input_ids"]
                if token == VIDEO
                else [token]
            )
            ids += written
            trained += [mask] * len(written)
        self.family, self.ids = family, torch.tensor(ids)
        self.labels = torch.where(torch.tensor(trained).bool(), self.ids, -100)

    def given(self, mean: Any, std: Any) -> dict[str, Tensor]:
        """Arguments of the model's forward, for a conversation with videos alone."""
        made = {
            "input_ids": self.ids[None],
            "mm_token_type_ids": 2 * (self.ids == VIDEO).int()[None],
            "video_grid_thw": torch.tensor([film.grid for film in self.films]),
            "pixel_values_videos": torch.cat([film.patches(mean, std) for film in self.films]),
        }
        if self.family == "qwen2_5_vl":
            made["second_per_grid_ts"] = torch.tensor(
                [film.seconds_per_grid for film in self.films]
            )
        return made

    def loss(self, model: Any, mean: Any, std: Any) -> tuple[Tensor, int]:
        """(sum over the trained tokens, how many there are) by transformers' forward."""
        with torch.no_grad():
            logits = model(**self.given(mean, std)).logits[0]
        total = torch.nn.functional.cross_entropy(logits[:-1], self.labels[1:], reduction="sum")
        return total, int((self.labels[1:] != -100).sum())
