"""The small published families as a user trains them: init, profile, plan, train, analyze and
export as processes; what the export generates is what the checkpoint writes."""

import json

import pytest
import torch
from PIL import Image

from disttrain_cli.spec.extras import EXTRAS, install_command
from tests.test_chain import disttrain, document

pytestmark = pytest.mark.slow
STEPS, ANSWERS = 60, 8
ASKED = "Which digit is this?"
#: By preset the class without torchvision of its image processor.
PROCESSORS = {
    "tiny-qwen2.5-vl": "Qwen2VLImageProcessorPil",
    "tiny-llava": "CLIPImageProcessorPil",
}


def generated(folder, processor, image, **options):
    """Tokens that transformers generates about an image, greedily, and the tokenizer."""
    import transformers

    model, said = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    words = transformers.AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": ASKED}]
    made = words.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=True
    )
    ids = torch.tensor(made["input_ids"])
    reader = getattr(transformers, processor).from_pretrained(folder)
    given = dict(reader([Image.open(image).convert("RGB")], return_tensors="pt"))
    grid = given.get("image_grid_thw")
    placeholder = words.convert_tokens_to_ids("<|image_pad|>")
    rows = 16 if grid is None else int(grid.prod()) // 4
    ids = ids.repeat_interleave(torch.where(ids == placeholder, rows, 1))[None]
    if grid is not None:
        given["mm_token_type_ids"] = (ids == placeholder).int()
    made = model.eval().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=16, **options
    )
    return made[0, ids.shape[1] :], words


@pytest.mark.parametrize("preset", PROCESSORS)
def test_a_preset_is_trained_answers_and_is_exported(tmp_path, preset):
    said = document(tmp_path, "init", "run", "--preset", preset, "--sample-data")
    run = tmp_path / "run"
    assert (tmp_path / said["model"] / "model.safetensors").is_file()
    path = run / "disttrain.yaml"
    text = path.read_text()
    assert "  answers: 100" in text
    path.write_text(text.replace("  answers: 100", f"  answers: {ANSWERS}"))

    profile = document(run, "profile", "--device", "cpu")
    assert profile["data"]["skipped"] == 0 and profile["data"]["images"] > 1500
    document(run, "plan")
    trained = document(run, "train", "--steps", STEPS)
    first, last = (trained["steps"][at]["losses"]["text"] for at in (0, -1))
    assert last < 0.15 * first
    answers = trained["samples"]["answers"]
    assert len(answers) == ANSWERS
    assert all(one["images"] and one["text"].endswith(".") for one in answers)
    assert all(one["recorded"].startswith(("It is a", "The ")) for one in answers)
    assert document(run, "analyze")["job"]["steps"] == STEPS

    code, out, err = disttrain(run, "export", "--to", "out")
    assert code == 0, out + err
    installs = preset != "tiny-llava" and not EXTRAS["generate"].installed
    install = f"{install_command('generate')} && " if installs else ""
    assert f"Next: {install}python -c" in err and "image-text-to-text" in err
    folder = next((run / "runs").rglob("samples.json")).parent
    images = [folder / one["images"][0] for one in answers[:2]]
    asked = [word for image in images for word in ("--image", image)]
    written = document(run, "sample", *asked, "--prompt", ASKED)["written"]
    for one, image in zip(written, images, strict=True):
        ids, words = generated(run / "out", PROCESSORS[preset], image)
        assert one["text"].strip() == words.decode(ids, skip_special_tokens=True).strip()
        assert one["text"].startswith("It is a")


def test_init_keeps_a_model_that_differs(tmp_path):
    document(tmp_path, "init", "run", "--preset", "tiny-llava")
    weights = tmp_path / "run" / "model" / "model.safetensors"
    before = weights.read_bytes()
    document(tmp_path, "init", "run", "--preset", "tiny-llava")
    assert weights.read_bytes() == before
    config = weights.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"image_seq_length": 17}))
    code, _, err = disttrain(tmp_path, "init", "run", "--preset", "tiny-llava")
    assert code == 1 and "config.json exists and differs" in err
