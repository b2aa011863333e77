"""Towers that run as the library has them: their rows, what is recorded of a whole model's forward,
and families that are refused."""

import io
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn
from torch._subclasses import FakeTensorMode

from disttrain_cli.api.presets import preset_text, write_model_files
from disttrain_cli.errors import SpecError
from disttrain_cli.models import library_tower, library_whole
from disttrain_cli.models.configs.wholes import WHOLE
from disttrain_cli.models.graph import build_layers, describe
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.models.library_frame import Tail
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.supported import COMPARED, image_text_families
from disttrain_cli.models.tensor_parallel import same_at_any_tp
from disttrain_cli.spec.library_calls import ImageCall
from disttrain_cli.spec.library_images import LibraryImages
from disttrain_cli.spec.library_processor import LibraryProcessor, digest_of
from disttrain_cli.spec.runfile import read_run
from tests.cases import first_fast
from tests.data.test_parts import picture
from tests.library_models import FAMILIES, FAST, REFUSED, write
from tests.whole_models import run_of

SIZES = [(50, 30), (16, 16), (200, 41), (31, 100)]


def written(folder: Path, family: str) -> tuple[Any, Any, LibraryImages, library_whole.TowerCall]:
    model, processor = write(folder, family)
    token = model.config.image_token_id
    head = LibraryImages(
        module="vision",
        folder=str(folder),
        image_token=token,
        inputs=("pixel_values",),
        digest=digest_of(folder),
    )
    call = library_whole.tower_calls(head, model.config)["image"]
    mrope = call.positions is not None
    head = head.model_copy(update={"inputs": call.names, "mrope": mrope})
    return model, processor, head, call


def items_of(files: list[tuple[int, torch.Tensor, Any]]) -> Items:
    """Items of files: their rows, values and table."""
    rows, values, tables = zip(*files, strict=True)
    return Items([(one, 1) for one in rows], {0: [*values]}, tables={0: [*tables]})


@pytest.mark.parametrize("family", first_fast([one for one in FAST if one not in REFUSED]))
def test_the_rows_of_an_image_are_the_librarys_own(tmp_path: Path, family: str) -> None:
    """One by one as in a batch, whatever their sizes."""
    model, processor, head, call = written(tmp_path, family)
    library_tower._unused.clear()
    with patch.object(torch.autograd, "backward", side_effect=AssertionError("before a fork")):
        tower = library_tower.Tower("vision", model.config, head, {"image": call})
    tower.to_empty(device="cpu")
    own, layers = model.model.state_dict(), dict(tower.named_parameters())
    assert {tower.published_path(path) for path in layers} == {
        name for name in own if not name.startswith(("language_model.", "text_model."))
    }
    for path, parameter in layers.items():
        parameter.data.copy_(own[str(tower.published_path(path))])
    alone, files = [], []
    for size in SIZES:
        image, text = Image.open(io.BytesIO(picture(*size))), head.placeholders["image"]
        rows = head.processor.spelled(size).rows
        packed = head.pack(head.processor.inputs(image.convert("RGB")), rows)
        files.append((rows, torch.from_numpy(packed.values)[None], packed.table[None]))
        items = items_of(files[-1:])
        given = processor(images=[image, image], text=f"{text}\n{text}", return_tensors="pt")
        arguments = {argument: given[name] for argument, name in call.inputs}
        with torch.no_grad():
            alone.append(tower({}, Batch({"image": items}))["image_embeds"])
            there = model.model.get_image_features(
                **arguments, **call.constants, return_dict=True
            ).pooler_output
        expected = library_tower.flat_rows(there)[:rows]
        torch.testing.assert_close(alone[-1], expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        together = tower({}, Batch({"image": items_of(files)}))["image_embeds"]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    sum(one.sum() for one in tower({}, Batch({"image": items})).values()).backward()
    assert tower.unused == {path for path, one in layers.items() if one.grad is None}
    blank = head.blank(SIZES[0])
    with FakeTensorMode():  # in a dry run the processor still returns values
        assert all(map(np.array_equal, head.blank(SIZES[0]), blank))


@pytest.mark.slow
def test_a_tower_is_priced_by_a_gpus_kernels(tmp_path: Path) -> None:
    """What it saves grows with its rows: no scores of all patches with each other are counted."""
    (tmp_path / "disttrain.yaml").write_text(preset_text("qwen3.5-9b"))
    write_model_files("qwen3.5-9b", tmp_path / "model")
    run = read_run(tmp_path / "disttrain.yaml")
    inputs, saved = describe(run), []
    (tower,) = build_layers(run, 0, 1, "meta", torch.bfloat16)
    (head,) = inputs.heads
    assert isinstance(head, LibraryImages)
    small, medium, large = (rows for rows, _ in head.spread)
    assert small < medium < large == head.processor.spelled((1024, 1024)).rows
    for rows in (small, large):
        batch = probe_batch(inputs, device="meta", image=[(rows, 1)])
        saved.append(layer_operators(tower, {}, batch).saved_bytes)
    assert saved[1] / saved[0] == pytest.approx(large / small, rel=0.05)
    assert same_at_any_tp(tower)


def config_of(family: str) -> Any:
    tiny = FAMILIES[family]
    made = getattr(transformers, f"{tiny.prefix}Config")
    return made(vision_config=tiny.vision, text_config=tiny.text, **(tiny.fields or {}))


@pytest.mark.parametrize(
    ("family", "factor"), [("cohere2_vision, scaled", 1.0), ("granite_docling", 0.25)]
)
def test_logits_are_scaled_as_the_whole_models_class_does(family: str, factor: float) -> None:
    """Cohere 2's own class has another scale, GraniteDocling's LLM no class with a head."""
    config = config_of(family)
    text, whole = config.get_text_config(), config.to_dict()
    setattr(text, WHOLE, {name: one for name, one in whole.items() if name != "text_config"})
    head, rows = nn.Linear(text.hidden_size, text.vocab_size), torch.rand(3, text.hidden_size)
    logits = Tail(library_whole.whole_of(text), "model")(rows, head)
    torch.testing.assert_close(logits, factor * head(rows))


def test_a_class_whose_logits_read_more_than_hidden_states_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        transformers.VipLlavaForConditionalGeneration,
        "forward",
        lambda self, **given: self.model(**given).image_hidden_states.mean(),
    )
    with pytest.raises(SpecError) as raised:
        library_whole._made(config_of("vipllava"))
    assert "more than hidden states" in raised.value.why


@pytest.mark.parametrize(("family", "why"), REFUSED.items())
def test_a_family_whose_forward_does_more_is_refused(tmp_path: Path, family: str, why: str) -> None:
    with pytest.raises(SpecError) as raised:
        written(tmp_path, family)
    assert why in raised.value.why


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (nn.Dropout(0.1), "dropout would depend on the layout"),
        (nn.BatchNorm2d(4), "normalises over a batch"),
    ],
)
def test_a_tower_that_depends_on_more_than_its_images_is_refused(part: Any, why: str) -> None:
    tower = nn.Module()
    tower.add_module("part", part)
    assert why in str(library_tower.unfit(tower))
    assert library_tower.unfit(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))) is None


def test_a_forward_that_changes_rows_tokens_or_positions_is_refused() -> None:
    ids, width = torch.tensor([5, 9, 9, 6]), 4
    rows, features = ids == 9, torch.arange(8.0).view(2, 4)
    config = SimpleNamespace(
        vocab_size=10, pad_token_id=0, layer_types=None, model_type="any", num_hidden_layers=1
    )
    llm = library_whole._Llm(SimpleNamespace(config=config, forward=lambda deep: None), width)
    embeds = llm.embed_tokens(ids)
    embeds[rows] = features
    given = {"llm": llm, "ids": ids, "rows": rows, "features": features, "media": "image"}
    check = partial(library_whole._checked, "any", **given)
    plain = {"inputs_embeds": embeds[None], "attention_mask": torch.ones(1, 4), "use_cache": False}
    assert check(plain) is None
    turned = torch.arange(4).expand(3, 1, 4)
    assert torch.equal(check(plain | {"position_ids": turned}), turned[:, 0])
    for other, why in (
        ({"inputs_embeds": 2 * embeds[None]}, "changes the tower's rows"),
        (
            {"inputs_embeds": (embeds - (~rows[:, None]).float())[None]},
            "embeddings of other tokens",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attend to later ones"),
        ({"position_ids": torch.zeros(1, 4)}, "not counted from 0"),
        ({"per_layer_inputs": ids[None]}, "reads other tokens"),
        ({"visual_pos_masks": ~rows[None]}, "adds rows to other tokens"),
        ({"deepstack_visual_embeds": [features, features]}, "of the tower's inner blocks"),
        ({"deep": features}, "also reads deep"),
    ):
        with pytest.raises(SpecError) as raised:
            check(plain | other)
        assert why in raised.value.why


@pytest.mark.slow
def test_every_family_of_the_library_runs_or_is_refused_with_a_reason() -> None:
    supported = {one.model_type: one for one in image_text_families()}
    assert len(supported) > 90
    assert all(one.refused != "" for one in supported.values())
    runs = {name for name, one in supported.items() if one.refused is None and one.compared}
    # published towers of one drop paths, the other's need timm
    assert runs >= COMPARED - {"qianfan_ocr", "perception_lm"} | {"llava"}
    assert "encoder-decoder" in str(supported["florence2"].refused)


def test_families_are_stated_as_compared_that_the_tests_train() -> None:
    trained = {name.partition(",")[0] for name in FAMILIES.keys() - REFUSED.keys()}
    assert trained == COMPARED


def test_a_budget_of_pixels_that_no_processor_reads_is_refused(tmp_path) -> None:
    write(tmp_path / "whole", "vipllava")
    with pytest.raises(SpecError, match=r"data\.max_image_pixels is not read"):
        describe(run_of(tmp_path / "whole", data={"max_image_pixels": 262144}))


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (None, "neither processor_config.json nor preprocessor_config.json"),
        ({"auto_map": {"AutoProcessor": "own.Own"}}, "code of its own (auto_map)"),
    ],
)
def test_a_folder_without_a_processor_of_the_library_is_refused(tmp_path, processor, why) -> None:
    model, _ = write(tmp_path, "vipllava")
    named = list(tmp_path.glob("*processor_config.json"))
    for path in named:
        path.unlink() if processor is None else path.write_text(json.dumps(processor))
    words = tmp_path / "tokenizer_config.json"
    given = json.loads(words.read_text())
    given.pop("processor_class", None)
    words.write_text(json.dumps(given))
    with pytest.raises(SpecError) as raised:
        LibraryProcessor(tmp_path, model.config.image_token_id, ImageCall())
    assert named and why in raised.value.why


def test_an_image_whose_height_is_taken_for_channels_is_refused(tmp_path: Path) -> None:
    model, _ = write(tmp_path, "vipllava")
    processor = LibraryProcessor(tmp_path, model.config.image_token_id, ImageCall())
    with pytest.raises(ValueError, match="taken for a number of channels"):
        processor.spelled((64, 3))
    assert processor.spelled((3, 64)).rows == 16
