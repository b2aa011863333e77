"""Folders of whole models whose JSON files leave fields out: what is read is what transformers
makes of them, or they are refused."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.weights import load_into
from disttrain_cli.spec.families.defaults import IMAGE_PROCESSORS
from tests.cases import first_fast, mostly_slow
from tests.whole_models import run_of, write_llava, write_qwen, write_tiled

WRITE = {
    "llava": write_llava,
    "siglip llava": partial(write_llava, tower="siglip"),
    "internvl": partial(write_tiled, family="internvl"),
    "idefics3": partial(write_tiled, family="idefics3"),
    "smolvlm": partial(write_tiled, family="smolvlm"),
    "llava_next": partial(write_tiled, family="llava_next"),
    "llava_onevision": partial(write_tiled, family="llava_onevision"),
    "flat qwen2_5_vl": partial(write_qwen, family="qwen2_5_vl", flat=True),
    "qwen2_5_vl": partial(write_qwen, family="qwen2_5_vl"),
    "qwen3_vl": partial(write_qwen, family="qwen3_vl"),
}
SECTIONS = ("vision_config", "text_config")
#: Of libraries' bookkeeping, or compared by themselves.
OTHERS = {"_name_or_path", "architectures", "dtype", "transformers_version", "tie_word_embeddings"}


@pytest.fixture(params=mostly_slow(WRITE, "internvl", "flat qwen2_5_vl"), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every family, without its weights."""
    made = tmp_path_factory.mktemp("left-out") / request.param.replace(" ", "-")
    WRITE[request.param](made)
    (made / "model.safetensors").unlink()
    return made


def cases(fields: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of the fields of a config.json that it may leave out."""
    own = [(name,) for name in fields if name not in ("model_type", *SECTIONS)]
    return own + [
        (section, name) for section in SECTIONS for name in fields.get(section, {}) if name
    ]


def without(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    left = json.loads(json.dumps(fields))
    inner = left
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]
    return left


def test_a_field_that_config_json_leaves_out_is_its_classs_default(folder: Path) -> None:
    path = folder / "config.json"
    given = json.loads(path.read_text())
    refused = []
    try:
        for case in cases(given):
            path.write_text(json.dumps(without(given, case)))
            try:
                run = run_of(folder)
                configs = read_configs(run)
            except SpecError:
                refused.append(case)
                continue
            check_as_transformers_reads(folder, run, configs, case)
    finally:
        path.write_text(json.dumps(given))
    assert len(refused) < len(cases(given)) / 3, refused
    assert ("tie_word_embeddings",) not in refused


def check_as_transformers_reads(
    folder: Path, run: Any, configs: dict[str, Any], case: tuple[str, ...]
) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(folder)
    joins = run.file.model.modules["vision"]
    for name, section in zip(("vision", "llm"), SECTIONS, strict=True):
        ours = configs[name].config.to_dict()
        expected = getattr(theirs, section).to_dict()
        if name == "vision" and joins.feature_layer is not None:
            ours["num_hidden_layers"] -= joins.feature_layer + 1
        differing = {
            field: (ours.get(field), value)
            for field, value in expected.items()
            if field not in OTHERS and ours.get(field) != value
        }
        assert not differing, (case, section)
    assert configs["llm"].config.tie_word_embeddings == theirs.tie_word_embeddings, case
    assert run.published.image_token == theirs.image_token_id, case
    if hasattr(theirs, "vision_feature_layer"):
        last = joins.projector == "norm_mlp" and theirs.vision_feature_layer == -1
        assert joins.feature_layer == (None if last else theirs.vision_feature_layer), case
    if hasattr(theirs, "downsample_ratio"):
        assert joins.merge == 1 / theirs.downsample_ratio, case
    if hasattr(theirs, "scale_factor"):
        assert joins.merge == theirs.scale_factor, case


def test_a_field_that_the_image_processor_leaves_out_is_its_classs_default(folder: Path) -> None:
    import transformers

    path = folder / "preprocessor_config.json"
    nested = not path.exists()
    path = folder / "processor_config.json" if nested else path
    given = json.loads(path.read_text())
    fields = given["image_processor"] if nested else given
    name = fields["image_processor_type"].removesuffix("Pil")
    removed = [field for field in fields if field != "image_processor_type"]
    refused = []
    try:
        for field in removed:
            left = without(fields, (field,))
            path.write_text(json.dumps(given | {"image_processor": left} if nested else left))
            try:
                run = run_of(folder)
                image = describe(run).image
            except SpecError:
                refused.append(field)
                continue
            _, read = run.published.image_fields()
            theirs = json.loads(getattr(transformers, f"{name}Pil")(**left).to_json_string())
            expected = {one: theirs[one] for one in IMAGE_PROCESSORS[name]}
            assert {one: read[one] for one in expected} == expected, field
            assert [*image.mean, *image.std] == [*theirs["image_mean"], *theirs["image_std"]]
    finally:
        path.write_text(json.dumps(given))
    assert {"image_mean", "image_std", "do_resize", "resample"}.isdisjoint(refused)


@pytest.mark.parametrize(
    ("family", "fields", "text"),
    [
        ("internvl", {}, {"tie_word_embeddings": False}),
        ("llava", {}, {"tie_word_embeddings": True}),
        ("llava_onevision", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
        ("qwen2_5_vl", {}, {"tie_word_embeddings": True}),
        ("smolvlm", {"tie_word_embeddings": True}, {}),
    ],
)
def test_the_head_is_the_embedding_where_the_class_says_so(
    tmp_path: Path, family: str, fields: dict[str, Any], text: dict[str, Any]
) -> None:
    """Whole models' classes differ in defaults, and in whether the LLM's own field counts."""
    from transformers import AutoModelForImageTextToText

    folder = tmp_path / family
    WRITE[family](folder)
    path = folder / "config.json"
    given = without(json.loads(path.read_text()), ("tie_word_embeddings",)) | fields
    own = {name: value for name, value in given["text_config"].items() if "tie_word" not in name}
    path.write_text(json.dumps(given | {"text_config": own | text}))
    weights = load_file(folder / "model.safetensors")
    weights = {name: one for name, one in weights.items() if "lm_head" not in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForImageTextToText.from_pretrained(folder)
    tied = theirs.lm_head.weight is theirs.model.get_input_embeddings().weight
    run = run_of(folder)
    assert any(layer.tied for layer in layer_table(run)) == tied
    layers = build_layers(run, 0, len(layer_table(run)))
    if tied:
        load_into(layers, run)
        assert torch.equal(layers[-1].lm_head.weight, theirs.lm_head.weight)
        return
    with pytest.raises(SpecError, match=r"missing: lm_head\.weight"):  # there it is random
        load_into(layers, run)


@pytest.mark.slow
@pytest.mark.parametrize("differs", first_fast([True, False]))
def test_a_head_of_its_own_is_not_tied_by_a_default(tmp_path: Path, differs: bool) -> None:
    """As transformers does: InternVL3-8B has a head, and its configuration does not say so."""
    from transformers import AutoModelForImageTextToText

    from disttrain_cli.runtime.outputs.export import export
    from tests.runtime.outputs.test_whole_export import saved

    folder = tmp_path / "internvl"
    write_tiled(folder, "internvl", tie_word_embeddings=False)
    path = folder / "config.json"
    path.write_text(json.dumps(without(json.loads(path.read_text()), ("tie_word_embeddings",))))
    weights = load_file(folder / "model.safetensors")
    embedding, name = (
        next(name for name in weights if name.endswith(ending))
        for ending in ("embed_tokens.weight", "lm_head.weight")
    )
    head = weights[embedding].clone()
    head[-1] += differs
    save_file(weights | {name: head}, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForImageTextToText.from_pretrained(folder)
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) is not differs
    run = run_of(folder)
    assert any(layer.tied for layer in layer_table(run)) is not differs
    layers = build_layers(run, 0, len(layer_table(run)))
    load_into(layers, run)
    assert torch.equal(layers[-1].lm_head.weight, head)
    if differs:
        saved(run, by=0.5)
        export(run, tmp_path / "out")
        found = load_file(tmp_path / "out" / "model.safetensors")
        again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
        assert again.config.tie_word_embeddings is False
        assert torch.equal(again.lm_head.weight, found[name])
        assert not torch.equal(found[name], found[embedding])


def test_a_folder_that_transformers_ties_by_default_is_written_tied(tmp_path: Path) -> None:
    from disttrain_cli.runtime.outputs.export import export
    from tests.runtime.outputs.test_whole_export import saved

    folder = tmp_path / "internvl"
    write_tiled(folder, "internvl", tie_word_embeddings=True)
    path = folder / "config.json"
    path.write_text(json.dumps(without(json.loads(path.read_text()), ("tie_word_embeddings",))))
    run = run_of(folder)
    saved(run, by=0.5)
    export(run, tmp_path / "out")
    there, found = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "out"))
    assert found.keys() == there.keys() and not any("lm_head" in name for name in found)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    shutil.rmtree(tmp_path / "runs")
