"""`disttrain data latents` as a user runs it, on the sample data, and the chain that reads them."""

import json
import subprocess
import sys

import pytest
import yaml

from disttrain_cli.profiling import sizes
from tests.commands.test_train import call
from tests.runtime.factory import REFINER

VAE = REFINER["vae"]


@pytest.fixture
def demo(tmp_path, capsys, monkeypatch):
    """The preset `tiny` with a generator in the latent space of a VAE, prepared beforehand."""
    assert call(["init", tmp_path, "--preset", "tiny", "--sample-data"], capsys)[0] == 0
    file = yaml.safe_load((tmp_path / "disttrain.yaml").read_text())
    generator = file["model"]["modules"]["image_generator"]
    generator |= {"vae": VAE, "cached_latents": True}
    generator["config"] |= {"sample_size": 4, "in_channels": 4, "out_channels": 4}
    file["cluster"]["gpus_per_node"] = 3
    file["train"] |= {"global_batch_size": 3, "steps": 2, "ordering": "none"}
    file["samples"] |= {"images": 2, "read": 1, "denoising_steps": 2}
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(file))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *words):
    code, out, err = call([*words, "--json"], capsys)
    assert code == 0, f"{words}: {out}\n{err}"
    return json.loads(out)


@pytest.mark.slow
def test_latents_are_prepared_and_the_bytes_of_each_are_told(demo, capsys):
    code, out, err = call(["data", "latents"], capsys)
    assert code == 0 and "512 bytes each" in out and "Next: disttrain profile" in err
    assert "its VAE has random weights" in err
    (told,) = said(capsys, "data", "latents")["latents"]
    assert told["image_bytes"] == 2 * 4 * 4 * 4 * 4 and told["encoded"] == 0
    files = (demo / "runs" / "tiny" / "latents" / "image_generator").glob("*.bin")
    assert sum(file.stat().st_size for file in files) == told["images"] * told["image_bytes"] > 0
    code, out, _ = call(["data", "latents", "--quiet"], capsys)
    assert code == 0 and out.strip() == told["path"]


def test_a_run_without_the_option_is_told_how_to_set_it(demo, capsys):
    text = (demo / "disttrain.yaml").read_text()
    (demo / "disttrain.yaml").write_text(
        text.replace("cached_latents: true", "cached_latents: false")
    )
    code, _, err = call(["data", "latents"], capsys)
    assert code == 1 and "model.modules.NAME.cached_latents: true" in err and "bug" not in err


@pytest.mark.slow
def test_the_chain_runs_with_prepared_latents_and_asks_for_them(demo, capsys, monkeypatch):
    monkeypatch.setattr(sizes, "SEQUENCES", 24)
    assert said(capsys, "profile")["modules"].keys() == {"image_encoder", "llm", "image_generator"}
    assert "plan" in said(capsys, "plan")
    code, _, err = call(["train"], capsys)
    assert code == 1 and "There are no latents for image_generator" in err
    assert "disttrain data latents" in err and "Traceback" not in err
    _, _, err = call(["data", "latents"], capsys)
    assert "Next: disttrain train" in err
    trained = said(capsys, "train")
    assert [step["losses"]["image"] > 0 for step in trained["steps"]] == [True, True]
    assert len(trained["images"]) == 2
    assert said(capsys, "train", "--resume", "--steps", "3")["resumed_from_step"] == 2
    assert len(said(capsys, "sample", "--prompt", "Draw a two.")["drawn"]) == 1
    assert "image_generator" in said(capsys, "export", "--to", "out")["modules"]
    text = (demo / "disttrain.yaml").read_text()
    (demo / "disttrain.yaml").write_text(
        text.replace("vae:\n", "vae:\n        scaling_factor: 0.5\n")
    )
    code, _, err = call(["data", "latents"], capsys)
    assert code == 0 and "Next: disttrain profile" in err


@pytest.mark.slow
def test_nothing_that_writes_to_stdout_is_imported():
    """DeepSpeed says there what device it found, in front of what --json prints."""
    code = "import sys, disttrain_cli.runtime.latents; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
