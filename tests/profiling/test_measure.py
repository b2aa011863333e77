"""The whole measurement, small: real data, a small model, two processes; and a model without images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.errors import DataError
from disttrain_cli.profiling import measure as room
from disttrain_cli.spec.profile import Profile, read_profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.work import Work

MODULES: dict[str, Any] = {
    "image_encoder": {"kind": "encoder", "architecture": "vit", "merge": 2,
                      "config": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
                                 "intermediate_size": 32, "patch_size": 8}},
    "llm": {"kind": "llm", "architecture": "llama",
            "config": {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": False}},
    "image_generator": {"kind": "generator", "architecture": "unet2d_condition", "image_size": 8, "context_tokens": 4,
                        "config": {"in_channels": 3, "out_channels": 3, "layers_per_block": 1,
                                   "block_out_channels": [8, 16],
                                   "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
                                   "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 16,
                                   "attention_head_dim": 8, "norm_num_groups": 4}},
}


def run_file(folder: Path, data: Path, modules: list[str], processes: int) -> Run:
    path = folder / "disttrain.yaml"
    path.write_text(yaml.safe_dump({
        "name": "small", "model": {"modules": {name: MODULES[name] for name in modules}},
        "data": {"sources": [{"path": str(data / "captions")}, {"path": str(data / "interleaved")}],
                 "sequence_length": 256, "max_image_pixels": 4096, "max_bad_fraction": 0.1},
        "cluster": {"gpus_per_node": processes, "device": "cpu"},
        "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"}}))
    return read_run(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("data")
    write_sample_data(folder)
    return folder


@pytest.fixture(scope="module")
def fewer() -> Any:
    """Fewer sequences than a user's profile, so that the test takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("disttrain_cli.profiling.sizes.SEQUENCES", 40)
        patch.setattr(room, "PASSES", 1)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, data: Path, fewer: None) -> tuple[Run, Profile]:
    run = run_file(tmp_path_factory.mktemp("run"), data, list(MODULES), processes=2)
    return run, room.measure(run, "auto")


@pytest.mark.slow
class TestThreeModules:
    def test_survives_the_way_through_its_file(self, measured: tuple[Run, Profile], tmp_path: Path) -> None:
        _, profile = measured
        path = tmp_path / "profile.json"
        path.write_text(profile.model_dump_json())
        assert read_profile(path) == profile

    def test_every_layer_has_a_cost(self, measured: tuple[Run, Profile]) -> None:
        _, profile = measured
        assert list(profile.modules) == list(MODULES)
        for module in profile.modules.values():
            assert set(module.layers) == set(module.costs)
            work = module.work_per_sequence
            for cost in module.costs.values():
                assert cost.tp["1"].forward_ms(work) > 0.0 and cost.tp["1"].backward_ms(work) > 0.0
            assert module.parameters == sum(module.costs[kind].parameters for kind in module.layers)
            assert module.costs[module.layers[1]].activation_bytes(work) > 0.0
            assert module.max_work_per_sequence.items >= work.items > 0.0

    def test_more_work_takes_more_time(self, measured: tuple[Run, Profile]) -> None:
        _, profile = measured
        block = profile.modules["llm"].costs["block"].tp["1"].backward_ms
        one = profile.modules["llm"].work_per_sequence
        assert block(one.scaled(8.0)) > 1.5 * block(one)
        assert block(Work()) >= 0.0

    def test_counts_the_devices_and_what_crosses_the_modules_ends(self, measured: tuple[Run, Profile]) -> None:
        run, profile = measured
        assert (profile.device.kind, profile.device.count, profile.device.shared_by) == ("cpu", 2, 2)
        encoder, generator = profile.modules["image_encoder"], profile.modules["image_generator"]
        assert encoder.output_bytes_per_sequence == pytest.approx(encoder.work_per_sequence.tokens / 4 * 32 * 4)
        targets = generator.work_per_sequence.items
        assert profile.modules["llm"].output_bytes_per_sequence == pytest.approx(targets * 4 * 32 * 4)
        assert generator.output_bytes_per_sequence == 0.0
        assert profile.fingerprints.model == run.file.model_fingerprint()
        assert profile.preprocess.images_per_s_per_core > 0.0 and profile.preprocess.sequences_per_s_per_core > 0.0
        assert profile.provenance["torch"] and profile.provenance["date"]


@pytest.mark.slow
def test_a_model_without_images_on_one_device(tmp_path: Path, data: Path, fewer: None) -> None:
    run = run_file(tmp_path, data, ["llm"], processes=1)
    profile = room.measure(run, "cpu")
    assert list(json.loads(profile.model_dump_json())["modules"]) == ["llm"]
    assert profile.data.images == 0 and profile.preprocess.images_per_s_per_core == 0.0
    assert profile.modules["llm"].tp["1"].forward_ms > 0.0


def test_data_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        room.measure(run_file(tmp_path, tmp_path / "nowhere", ["llm"], processes=1), "cpu")
