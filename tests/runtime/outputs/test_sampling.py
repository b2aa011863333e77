"""Images at the end of training: from averages where there are some, through the VAE's decoder from
its folder."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.outputs import sampling
from disttrain_cli.spec.runfile import read_run
from tests.commands.conftest import make_profile
from tests.models.test_vae import GENERATOR
from tests.models.test_weights import library_model, make
from tests.runtime.factory import MODEL, write_run
from tests.runtime.outputs.test_export import trained


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_sample_data(folder)
    return folder


@pytest.mark.slow
def test_a_latent_generator_makes_images(tmp_path, data):
    unet = (
        MODEL["modules"]["image_generator"]["config"] | GENERATOR["config"] | {"sample_size": None}
    )
    library_model(
        make(tmp_path, "unet2d_condition", vae=GENERATOR["vae"], config=unet), "vae"
    ).save_pretrained(tmp_path / "vae")
    run = write_run(tmp_path, data)
    content = yaml.safe_load(run.path.read_text())
    content["model"]["modules"]["image_generator"] |= {
        "vae_folder": "vae",
        "config": unet,
        "noise": {"prediction": "v_prediction"},
    }
    content["samples"] = {"images": 3, "denoising_steps": 2}

    def images(name, step, averaged=()):
        run.path.write_text(yaml.safe_dump(content))
        opened = read_run(run.path)
        index = build_index(opened, describe(opened))
        profile = make_profile(opened.file).model_copy(update={"inputs": describe(opened)})
        assert index.fingerprint
        trained(opened, step, averaged)
        folder = Path(tmp_path, name)
        sampling.main(
            {
                "run": run.source,
                "profile": profile.model_dump(mode="json"),
                "device": "cpu",
                "images": str(folder),
                "checkpoint": str(opened.dir.checkpoints / f"step-{step:06d}"),
            }
        )
        return [path.read_bytes() for path in sorted(folder.glob("*.png"))]

    first = images("first", 1)
    assert len(first) == 3 and all(image.startswith(b"\x89PNG") for image in first)
    assert pixels(first[0]).shape == (16, 16, 3) and first[0] != first[1]
    assert images("averaged", 2, ("image_generator",)) != first
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert images("random", 3) != first


def pixels(png):
    import cv2

    return cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
