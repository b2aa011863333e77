"""`disttrain sample` at the command line: any checkpoint of any model, and what is refused."""

import json

import cv2
import numpy as np
import pytest
import yaml

from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.samples import read_samples
from tests.commands.test_export import disttrain
from tests.models.conftest import AUDIO, MODULES
from tests.models.test_vae import GENERATOR
from tests.runtime.outputs.test_export import UNET, trained

LATENT = {
    **MODULES["image_generator"],
    "config": UNET | GENERATOR["config"],
    "vae": GENERATOR["vae"],
}


def written_run(folder, *modules, **samples):
    known = MODULES | {"audio_encoder": AUDIO, "latent": LATENT}
    content = {
        "name": "tiny",
        "model": {"modules": {name: known[name] for name in modules}},
        "data": {"sources": [{"path": "data"}], "sequence_length": 48, "max_image_pixels": 1024},
        "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"},
        "samples": {"denoising_steps": 2} | samples,
    }
    folder.mkdir(exist_ok=True)
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content))
    run = read_run(folder / "disttrain.yaml")
    trained(run, 3)
    return run


@pytest.fixture
def pictures(tmp_path):
    paths = [tmp_path / "wide.png", tmp_path / "high.jpg"]
    for number, (path, shape) in enumerate(zip(paths, [(16, 32, 3), (32, 16, 3)], strict=True)):
        cv2.imwrite(
            str(path), np.random.default_rng(number).integers(0, 255, shape).astype(np.uint8)
        )
    return paths


def said(capsys, *words):
    assert disttrain("sample", *words, "--json", "--quiet") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_images_and_texts_of_every_prompt_after_every_image(
    tmp_path, capsys, monkeypatch, pictures
):
    written_run(
        tmp_path / "run", "image_encoder", "audio_encoder", "llm", "image_generator", "latent"
    )
    monkeypatch.chdir(tmp_path / "run")
    wishes = [
        "--prompt",
        "Draw.",
        "--prompt",
        "Or not",
        "--image",
        pictures[0],
        "--image",
        pictures[1],
        "--count",
        2,
        "--tokens",
        5,
    ]
    found = said(capsys, *wishes)
    assert found["path"].endswith("runs/tiny/samples/step-000003") and found["step"] == 3
    assert len(found["drawn"]) == 2 * 2 * 2 * 2 and len(found["written"]) == 4
    assert {(one["image"], one["prompt"]) for one in found["written"]} == {
        (str(path), prompt) for path in pictures for prompt in ("Draw.", "Or not")
    }
    files = [
        f"{module}/{number:02d}.png"
        for module in ("image_generator", "latent")
        for number in range(8)
    ]
    assert [one["file"] for one in found["drawn"]] == files
    root = tmp_path / "run" / "runs" / "tiny" / "samples"
    images = [(root / "step-000003" / name).read_bytes() for name in files]
    assert len(set(images)) == len(images) and all(image.startswith(b"\x89PNG") for image in images)
    assert read_samples(root / "step-000003").drawn[0].prompt == "Draw."
    again = said(capsys, *wishes)
    assert again["path"].endswith("step-000003-1") and again["written"] == found["written"]
    assert [(root / "step-000003-1" / name).read_bytes() for name in files] == images
    assert (
        said(capsys, *wishes, "--seed", 1, "--temperature", 3, "--out", tmp_path / "out")["written"]
        != found["written"]
    )
    assert (tmp_path / "out" / files[0]).read_bytes() != images[0]


def test_what_a_prompt_gives_does_not_depend_on_the_prompts_beside_it(tmp_path, capsys, pictures):
    written_run(tmp_path / "run", "image_encoder", "llm")
    few = ["--tokens", 3]
    cv2.imwrite(str(pictures[1]), np.zeros((32, 32, 3), np.uint8))  # of more tokens
    both = said(capsys, tmp_path / "run", "--image", pictures[0], "--image", pictures[1], *few)[
        "written"
    ]
    alone = [
        said(capsys, tmp_path / "run", "--image", picture, *few)["written"][0]
        for picture in pictures
    ]
    assert [one["text"] for one in both] == [one["text"] for one in alone] and both[0][
        "text"
    ] != both[1]["text"]


def test_a_language_model_writes_text_and_says_so_in_a_table(tmp_path, capsys, pictures):
    written_run(tmp_path / "run", "llm")
    checkpoint = tmp_path / "run" / "runs" / "tiny" / "checkpoints" / "step-000003"
    assert disttrain("sample", checkpoint, "--prompt", "Say\x1b[31m more", "--tokens", 4) == 0
    told = capsys.readouterr()
    assert "Written" in told.out and "Drawn" not in told.out and "\x1b[31m" not in told.out
    assert disttrain("sample", checkpoint, "--prompt", "again", "--quiet") == 0
    assert capsys.readouterr().out.strip().endswith("step-000003-1")
    assert disttrain("sample", checkpoint, "--image", pictures[0]) == 2
    assert "reads no images" in capsys.readouterr().err


def test_checkpoints_are_found_by_run_file_folder_and_step(tmp_path, capsys, monkeypatch):
    run = written_run(tmp_path / "run", "llm")
    trained(run, 12)
    checkpoints = run.dir.checkpoints
    moved = tmp_path / "elsewhere"
    (checkpoints / "step-000003").rename(moved)
    for given in (run.path, run.folder, run.dir.root, checkpoints, checkpoints / "step-000012"):
        assert said(capsys, given, "--prompt", "a", "--tokens", 1)["step"] == 12
    assert disttrain("sample", moved, "--prompt", "a") == 1
    error = capsys.readouterr().err
    assert "--run" in error and run.file.model_fingerprint() in error
    assert said(capsys, moved, "--run", run.path, "--prompt", "a", "--tokens", 1)["step"] == 3
    monkeypatch.chdir(run.folder)
    assert said(capsys, "--prompt", "a", "--tokens", 0)["written"][0]["text"] == ""


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        ([], 2, "--prompt"),
        (["--prompt", "a", "--out", "run"], 2, "run exists"),
        (["nowhere", "--prompt", "a"], 1, "nowhere"),
        (["--image", "none.png"], 1, "none.png"),
        (["--image", "run/disttrain.yaml"], 1, "not a JPEG"),
        (["--image", "cut.png"], 1, "cut.png"),
        (["--prompt", "long " * 20], 2, "sequence_length"),
        (["--prompt", "a", "--temperature", "nan"], 2, "temperature"),
        (["--prompt", "a", "--count", 2], 2, "no generator"),
        (["run/made", "--prompt", "a"], 1, "is an export"),
        (["run/runs", "--prompt", "a"], 1, "no checkpoint"),
    ],
)
def test_what_is_refused(tmp_path, capsys, monkeypatch, pictures, words, code, names):
    written_run(tmp_path / "run", "image_encoder", "llm")
    (tmp_path / "cut.png").write_bytes(pictures[0].read_bytes()[:200])
    (tmp_path / "run" / "made").mkdir()
    (tmp_path / "run" / "made" / "model.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = words if words[:1] and words[0].startswith(("run/", "nowhere")) else ["run", *words]
    assert disttrain("sample", *given) == code
    error = capsys.readouterr().err
    assert names in error and "Traceback" not in error and "a bug" not in error
    assert not (tmp_path / "run" / "runs" / "tiny" / "samples").exists()


def test_another_model_and_no_checkpoint_are_refused(tmp_path, capsys):
    run = written_run(tmp_path / "run", "llm")
    run.path.write_text(run.path.read_text().replace("sequence_length: 48", "sequence_length: 64"))
    assert disttrain("sample", run.path, "--prompt", "a") == 1
    error = capsys.readouterr().err
    assert (
        run.file.model_fingerprint() in error
        and "another model" in error
        and "--resume" not in error
    )
    run.path.write_text(run.path.read_text().replace("name: tiny", "name: other"))
    assert disttrain("sample", run.path, "--prompt", "a") == 1
    assert "disttrain train" in capsys.readouterr().err


@pytest.mark.slow
def test_the_judge_of_the_run_says_what_it_sees(tmp_path, capsys):
    pytest.importorskip("sklearn")
    written_run(tmp_path / "run", "llm", "image_generator", judge="digits")
    found = said(
        capsys, tmp_path / "run", "--prompt", "Draw a seven.", "--prompt", "Draw 7 or eight."
    )
    assert [one["asked"] for one in found["drawn"]] == ["seven", None]
    assert all(one["recognised"] for one in found["drawn"]) and found["judge"]["accuracy"] > 0.95


def test_a_judge_that_is_not_installed_is_said_before_anything_is_done(
    tmp_path, capsys, monkeypatch
):
    run = written_run(tmp_path / "run", "llm", "image_generator", judge="digits")
    monkeypatch.setattr("disttrain_cli.data.metrics.find_spec", lambda name: None)
    assert disttrain("sample", run.path, "--prompt", "Draw a seven.") == 1
    assert (
        "pip install 'scikit-learn>=1.5'" in capsys.readouterr().err
        and not run.dir.samples.exists()
    )
