"""Conversations of whole published models: from a JSON to the loss, which is the library's own on
what its template and its processor make of them."""

import json

import numpy as np
import pytest
import torch

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.feeding import to_batch
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile.published import is_all
from tests.cases import mostly_slow
from tests.commands.conftest import make_profile
from tests.data.test_parts import SIZES as IMAGES_OF_CHATS
from tests.data.test_parts import told, write_json
from tests.models.test_towers import INTERNVIT_6B
from tests.models.test_whole import FAMILIES, loaded, loss_of, picture
from tests.whole_models import IMAGE, run_of, tiled_processor, write_tiled

LENGTH = 512
TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message.role }}: \
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}
{% elif message.content is string %}{{ message.content }}
{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>
{% else %}{{ part.text }}
{% endif %}{% endfor %}{% endif %}{% endfor %}"""
SIZES = [(50, 40), (33, 90), (40, 40)]


def conversations():
    """Images of different sizes, one or two in a turn, in the first or in a later one."""
    first, second, third = ({"type": "image", "image": f"{number}.png"} for number in range(3))
    asked, more = ({"type": "text", "text": text} for text in ("What is it?", "And these?"))
    return [
        [
            {"role": "user", "content": [first, asked]},
            {"role": "assistant", "content": "A wall."},
            {"role": "user", "content": [second, third, more]},
            {"role": "assistant", "content": "Two more, both of colours."},
        ],
        [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": [asked, third]},
            {"role": "assistant", "content": "Green."},
        ],
    ]


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "clip and llama"))
def test_the_loss_of_conversations_is_the_librarys_own(tmp_path, family):
    from transformers import PreTrainedTokenizerFast

    write, processor = FAMILIES[family]
    model = write(tmp_path / "whole")
    (tmp_path / "whole" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "data").mkdir()
    pictures = [picture(*size, seed=number) for number, size in enumerate(SIZES)]
    for number, (file, _) in enumerate(pictures):
        (tmp_path / "data" / f"{number}.png").write_bytes(file)
    lines = [json.dumps({"messages": turns}) for turns in conversations()]
    (tmp_path / "data" / "chats.jsonl").write_text("\n".join(lines))
    data = {"sequence_length": LENGTH}
    run = run_of(tmp_path / "whole", data=data, global_batch_size=1)
    inputs, layers = describe(run), loaded(run)
    index = build_index(run, inputs)
    assert not index.skipped and len(index) == 2

    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path / "whole")
    total, count = torch.zeros(()), 0
    for turns in conversations():
        given = reference.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        images = [
            pictures[int(part["image"][0])][1]
            for turn in turns
            for part in turn["content"]
            if isinstance(part, dict) and part["type"] == "image"
        ]
        seen = processor(images, return_tensors="pt")
        rows = (
            (seen["image_grid_thw"].prod(dim=1) // 4).tolist()
            if "image_grid_thw" in seen
            else [int(index.tokens[index.kinds == 1][0])] * len(images)
        )
        repeats = np.array([rows.pop(0) if id_ == IMAGE else 1 for id_ in given["input_ids"]])
        ids = torch.from_numpy(np.repeat(given["input_ids"], repeats))
        trained = torch.from_numpy(np.repeat(given["assistant_masks"], repeats)).bool()
        more = dict(seen)
        if "image_grid_thw" in seen:
            more["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        with torch.no_grad():
            logits = model(input_ids=ids[None], **more).logits[0]
        labels = torch.where(trained, ids, -100)[1:]
        total += torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int((labels >= 0).sum())

    batch = loaded_batch(run, index, layers)
    assert int((batch.labels >= 0).sum()) == count == batch.label_tokens
    torch.testing.assert_close(loss_of(layers, batch), total / count, atol=1e-4, rtol=0)


def loaded_batch(run, index, layers, size=1):
    """The first `size` sequences of a run, as one batch."""
    unit = UnitPlan(
        name="all", modules=run.file.model.order, gpus=1, layers_per_stage=[len(layer_table(run))]
    )
    layout = Layout(
        global_batch_size=size, microbatch_size=size, microbatches=1, gpus_used=1, units=[unit]
    )
    profile = make_profile(run.file).model_copy(update={"inputs": describe(run)})
    orders = Orders(run.file, layout, index, profile)
    fields = {field for layer in layers for field in layer.needs}
    with Loader(run, orders, unit="all", replica=0, fields=fields) as loader:
        return to_batch(loader.fetch(0, 0), loader.order(0), torch.device("cpu"), torch.float32)


#: OneVision's features are interpolated where they are more than two tiles'.
SMALL = {"vision_aspect_ratio": "anyres_max_2"}
#: Family, and what its folder differs in: blocks as the largest InternVL has them; tiles of 3 × 3
#: patches to a row, which no power of two divides.
TILES = {
    "internvl": ("internvl", {}),
    "internvl, 6B": (
        "internvl",
        {
            "tower": INTERNVIT_6B,
            "text": {"model_type": "qwen3", "head_dim": 12},
            "vision_feature_layer": -2,
        },
    ),
    "idefics3": ("idefics3", {}),
    "smolvlm": ("smolvlm", {"tie_word_embeddings": True}),
    "llava_next": ("llava_next", {}),
    "llava_next, last block": ("llava_next", {"vision_feature_layer": -1}),
    "llava_onevision": ("llava_onevision", {}),
    "llava_onevision, interpolated": ("llava_onevision", SMALL | {"cut": SMALL}),
    "smolvlm, uncut": ("smolvlm", {"cut": {"do_image_splitting": False}}),
    # tiles that are no whole patches, as 384 pixels are not of 14
    "idefics3, odd tiles": (
        "idefics3",
        {
            "tower": {"image_size": 17},
            "cut": {"size": {"longest_edge": 4 * 17}, "max_image_size": {"longest_edge": 17}},
        },
    ),
    "llava_onevision, odd tiles": (
        "llava_onevision",
        {
            "tower": {"image_size": 17},
            "cut": {
                "size": {"height": 17, "width": 17},
                "image_grid_pinpoints": [[17, 17], [17, 34], [34, 17], [34, 34]],
            },
        },
    ),
}


@pytest.mark.parametrize("name", mostly_slow(TILES))
def test_the_loss_of_conversations_about_tiles_is_the_librarys_own(tmp_path, name):
    """Through the processor's own template, tiles and separators."""
    family, fields = TILES[name]
    model = write_tiled(tmp_path / "whole", family, **fields)
    write_json(tmp_path / "data")
    run = run_of(tmp_path / "whole", data={"sequence_length": 2 * LENGTH}, global_batch_size=1)
    assert is_all(run.published, run.file.model)
    layers, index = loaded(run), build_index(run, describe(run))
    assert not index.skipped and len(index) == len(IMAGES_OF_CHATS)
    processor = tiled_processor(family, **fields.get("cut", {}))
    batch = loaded_batch(run, index, layers)
    total, count = torch.zeros(()), 0
    for sizes in IMAGES_OF_CHATS:
        given = told(processor, sizes)
        trained = torch.tensor(given.pop("assistant_masks"))[0].bool()
        given = {key: torch.as_tensor(np.array(value)) for key, value in given.items()}
        with torch.no_grad():
            logits = model(**given).logits[0]
        labels = torch.where(trained, given["input_ids"][0], -100)[1:]
        total += torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int((labels >= 0).sum())
    assert int((batch.labels >= 0).sum()) == count == batch.label_tokens
    torch.testing.assert_close(loss_of(layers, batch), total / count, atol=1e-4, rtol=0)
