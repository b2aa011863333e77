"""A run folder with a profile made by hand, so that `plan` and `train --dry-run` need no
measurement."""

import shutil
from pathlib import Path

import pytest

from disttrain_cli.api.presets import preset_text
from disttrain_cli.app import main
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.profile import (
    DeviceProfile,
    Fingerprints,
    ModuleProfile,
    ModuleTime,
    PreprocessProfile,
    Profile,
)
from disttrain_cli.spec.runfile import RunFile, read_run
from disttrain_cli.spec.whole import write_whole
from disttrain_cli.spec.work import Work
from tests import profiles

# module → kind, layers, ms per token of one layer's forward, mean work of one sequence
MODULES = {
    "image_encoder": (
        "encoder",
        ["embed", "block", "block", "block", "merge"],
        0.02,
        Work(2, 120, 12000),
    ),
    "llm": (
        "llm",
        ["embed", "block", "block", "block", "block", "head"],
        0.01,
        Work(1, 200, 30000),
    ),
    "image_generator": ("generator", ["entry", "unet", "loss"], 0.03, Work(1, 256, 65536)),
}


def module_profile(kind, layers, ms_per_token, work):
    """A module whose layers all cost the same: backward twice the forward, 1 MB kept per token."""

    def per_token(value):
        return Polynomial(per_token=value)

    cost = profiles.cost(per_token(ms_per_token), 100_000, per_token(4096.0), per_token(2e5))
    forward_ms = len(layers) * ms_per_token * work.tokens
    whole = ModuleTime(forward_ms=forward_ms, backward_ms=2 * forward_ms, fit_error_pct=2.0)
    return ModuleProfile(
        kind=kind,
        parameters=100_000 * len(layers),
        layers=layers,
        costs=dict.fromkeys(layers, cost),
        tp={"1": whole},
        work_per_sequence=work,
        max_work_per_sequence=work.scaled(2),
        cut_bytes_per_sequence=[1e5] * len(layers),
    )


def make_profile(file: RunFile) -> Profile:
    """A consistent profile of the tiny preset's modules on six processes."""
    return Profile(
        precision="fp32",
        fingerprints=Fingerprints(
            model=file.model_fingerprint(), data="0" * 16, cluster=file.cluster_fingerprint()
        ),
        cluster=file.cluster,
        provenance={"disttrain": "0.1.0"},
        device=DeviceProfile(
            name="test device",
            kind="cpu",
            count=6,
            memory_gib=4,
            peak_tflops=0.1,
            shared_by=6,
            cores=6,
        ),
        inputs=ModelInputs(
            llm="llm",
            vocabulary=272,
            sequence_length=256,
            heads=[
                ImageInput(module="image_encoder", patch_px=8, merge=2, max_pixels=65536),
                TargetInput(
                    module="image_generator", size_px=16, context_tokens=8, latent_pixels=256
                ),
            ],
        ),
        modules={name: module_profile(*about) for name, about in MODULES.items()},
        links=profiles.links(),
        data=profiles.data(images=2, tokens=200, patches=60),
        preprocess=PreprocessProfile(images_per_s_per_core=2000, sequences_per_s_per_core=800),
    )


def profiled(folder: Path) -> Path:
    """The tiny preset's run folder, profiled."""
    write_whole(folder / "disttrain.yaml", preset_text("tiny"))
    run = read_run(folder / "disttrain.yaml")
    write_whole(run.dir.profile, make_profile(run.file).model_dump_json())
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The tiny preset's run folder, profiled."""
    return profiled(tmp_path)


@pytest.fixture(scope="session")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, planned; for tests that change nothing in it."""
    folder = profiled(tmp_path_factory.mktemp("planned"))
    with pytest.raises(SystemExit) as left:
        main(["plan", str(folder), "--strategy", "disaggregated", "--quiet"])
    assert left.value.code == 0
    return folder


@pytest.fixture
def planned(planned_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(planned_once, tmp_path, dirs_exist_ok=True)
    return tmp_path
