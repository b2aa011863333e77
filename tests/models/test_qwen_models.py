"""Qwen2.5-VL and Qwen3-VL whole: hidden states, logits and loss of packed conversations equal
transformers' own, one conversation at a time."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain_cli.data.positions import grid_positions, sample_positions
from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.layer import Batch, Items, PipelineLayer
from disttrain_cli.models.weights import Source, load_into
from disttrain_cli.spec.heads import Grid
from disttrain_cli.spec.runfile import Run
from tests.whole_models import QWEN, QWEN_TOWER

TEXT = {
    "vocab_size": 270,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
#: By family the tower's and the LLM's configurations; of the latter with few frequencies for times.
FAMILIES = {name: (QWEN_TOWER | tower, TEXT | llm) for name, (tower, llm) in QWEN.items()}
IMAGE, VIDEO, START, END = 259, 260, 261, 262
#: By sequence its conversations: numbers of text tokens, and grids of images among them.
PACKED: list[list[list[int | Grid]]] = [
    [[5, (4, 6), 4, (8, 4), (4, 4), 3], [2, (6, 8), 6]],
    [[7], [(4, 4), 9, (2, 8), 1]],
]


def qwen_run(make_run: Callable[..., Run], family: str, **eye: Any) -> Run:
    """A run of both modules of a family."""
    tower, text = FAMILIES[family]
    module = {
        "kind": "encoder",
        "architecture": f"{family}_vision",
        "config": tower,
        "projector": "none",
    }
    run = make_run(image_encoder=None, image_generator=None)
    plain = run.file.model_dump(mode="json", exclude_none=True)
    plain["model"]["modules"] = {
        "eye": module | eye,
        "llm": {"kind": "llm", "architecture": f"{family}_text", "config": text},
    }
    plain["data"]["sequence_length"] = 64
    return Run(path=run.path, file=type(run.file).model_validate(plain))


def whole_model(family: str) -> Any:
    """transformers' own with random weights."""
    import transformers

    prefix = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    tower, text = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=tower,
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return whole


def model_layers(run: Run, whole: Any, folder: Path) -> list[PipelineLayer]:
    """Our layers with the weights of the whole model's folder."""
    whole.save_pretrained(folder / "whole")
    configs, layers = read_configs(run), build_layers(run, 0, len(layer_table(run)))

    def source(_: Run, module: str, part: str) -> Source:
        own = configs[module]
        return Source("model.folder", folder / "whole", own.architecture, own.config)

    notes = load_into(layers, run, source)
    assert not any("start at random" in note for note in notes)
    return layers


def patches_of(image: Tensor) -> Tensor:
    """[P, ...] of an image [C, H, W] as transformers' processors lay patches out, the image
    twice."""
    cut = image.unflatten(1, (-1, 2, 4)).unflatten(4, (-1, 2, 4))
    blocks = cut.permute(1, 4, 2, 5, 0, 3, 6)
    return blocks.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).flatten(4).flatten(0, 3)


class Conversation:
    """One sample: its tokens, and images in order."""

    def __init__(self, parts: list[int | Grid], draws: torch.Generator) -> None:
        ids: list[int] = []
        self.images: list[tuple[int, Grid, Tensor]] = []  # place, grid of patches, pixels
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(257, (part,), generator=draws).tolist()
            else:
                pixels = torch.randn(3, part[0] * 4, part[1] * 4, generator=draws)
                self.images.append((len(ids), part, pixels))
                ids += [IMAGE] * (part[0] * part[1] // 4)
        self.ids = torch.tensor(ids)

    def given(self) -> dict[str, Tensor]:
        """Arguments of transformers' forward; adjacent images are told apart by their grids."""
        made = {"input_ids": self.ids[None]}
        if self.images:
            made["pixel_values"] = torch.cat([patches_of(image) for _, _, image in self.images])
            made["image_grid_thw"] = torch.tensor([[1, *grid] for _, grid, _ in self.images])
            made["mm_token_type_ids"] = (self.ids == IMAGE).int()[None]
        return made

    def positions(self) -> Tensor:
        grids = [
            (at, grid_positions((1, rows // 2, columns // 2)))
            for at, (rows, columns), _ in self.images
        ]
        return torch.from_numpy(sample_positions("mrope", len(self.ids), grids))


def packed(
    length: int, packing: list[list[list[int | Grid]]]
) -> tuple[Batch, list[list[Conversation]]]:
    """Conversations of some sequences as a batch, and each alone."""
    draws = torch.Generator().manual_seed(5)
    talks = [[Conversation(parts, draws) for parts in sequence] for sequence in packing]
    ids, positions = (
        torch.zeros(len(talks), length).long(),
        torch.zeros(3, len(talks), length).long(),
    )
    labels, lengths = torch.full(ids.shape, -100), []
    images: list[tuple[Grid, int, Tensor]] = []
    for row, sequence in enumerate(talks):
        start = 0
        for talk in sequence:
            stop = start + len(talk.ids)
            ids[row, start:stop], positions[:, row, start:stop] = talk.ids, talk.positions()
            labels[row, start : stop - 1] = talk.ids[1:]
            images += [(grid, row * length + start + at, p) for at, grid, p in talk.images]
            lengths.append(len(talk.ids))
            start = stop
        lengths.append(length - start)
    images.sort(key=lambda image: image[:2])
    rows = [torch.arange(at, at + grid[0] * grid[1] // 4) for grid, at, _ in images]
    values = [
        torch.stack([pixels for *_, pixels in same])
        for _, same in groupby(images, key=lambda image: image[0])
    ]
    items = Items([grid for grid, *_ in images], {0: values}, torch.cat(rows))
    batch = Batch(
        {"image": items},
        token_ids=ids,
        positions=positions,
        sample_lengths=lengths,
        labels=labels,
        label_tokens=float((labels >= 0).sum()),
    )
    return batch, talks


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_conversations_equal_transformers_own_one_at_a_time(
    make_run: Callable[..., Run], tmp_path: Path, family: str
) -> None:
    run, whole = qwen_run(make_run, family), whole_model(family)
    layers = model_layers(run, whole, tmp_path)
    assert describe(run).positions == "mrope"
    # transformers' own positions fail for adjacent images: a token stands between them
    packing = [[[one for part in parts for one in (part, 1)] for parts in seq] for seq in PACKED]
    batch, talks = packed(64, packing)
    table, state, hidden = layer_table(run), dict[str, Tensor](), []
    for place, layer in enumerate(layers):
        # a cut before every layer: only what is live crosses it
        state = {spec.name: state[spec.name] for spec in live_tensors(table, place)}
        state |= layer(state, batch)
        if layer.module == "llm" and layer.kind != "head":
            hidden.append(state["hidden"].unflatten(0, (2, 64)))
    head = layers[-1]
    logits = head.logits(hidden[-1].flatten(0, 1)).unflatten(0, (2, 64))
    total = torch.zeros(())
    for row, sequence in enumerate(talks):
        start = 0
        for talk in sequence:
            with torch.no_grad():
                made = whole(**talk.given(), output_hidden_states=True)
            stop = start + len(talk.ids)
            if talk.images:
                found, _ = whole.model.get_rope_index(
                    talk.ids[None],
                    mm_token_type_ids=(talk.ids == IMAGE).int()[None],
                    image_grid_thw=talk.given()["image_grid_thw"],
                )
                assert torch.equal(found[:, 0], talk.positions())
            for level, own in enumerate(hidden[:-1]):
                # what a block of transformers gives is before DeepStack's addition
                if family == "qwen2_5_vl" or level in (0, 3):
                    torch.testing.assert_close(
                        own[row, start:stop], made.hidden_states[level][0], rtol=1e-4, atol=1e-4
                    )
            torch.testing.assert_close(
                logits[row, start:stop], made.logits[0], rtol=1e-4, atol=1e-4
            )
            total = total + torch.nn.functional.cross_entropy(
                made.logits[0, :-1], talk.ids[1:], reduction="sum"
            )
            start = stop
    torch.testing.assert_close(
        state["loss/text"], 0.5 * total / batch.label_tokens, rtol=1e-5, atol=0
    )
    state["loss/text"].backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


def test_a_projector_or_none(make_run: Callable[..., Run]) -> None:
    kinds = [info.kind for info in layer_table(qwen_run(make_run, "qwen2_5_vl"))]
    assert kinds[4:7] == ["block.global", "merger", "embed"]
    joined = layer_table(qwen_run(make_run, "qwen3_vl", projector="mlp"))
    assert [info.kind for info in joined if info.module == "eye"][-2:] == ["merger", "projector"]
    for eye, words in (
        (
            {"config": FAMILIES["qwen2_5_vl"][0] | {"out_hidden_size": 40}},
            ("40 values", "LLM's 48"),
        ),
        ({"architecture": "vit", "config": {}}, ("none", "of vit")),
    ):
        with pytest.raises(SpecError) as error:
            layer_table(qwen_run(make_run, "qwen2_5_vl", **eye))
        assert all(word in str(error.value) for word in ("eye.projector", *words))
