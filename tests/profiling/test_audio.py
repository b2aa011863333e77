"""Profiles of a model with an image encoder and an audio encoder."""

from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.errors import DataError
from disttrain_cli.models.graph import describe, layer_table, parallel_layers
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.profiling import measure as room
from disttrain_cli.profiling import preprocess
from disttrain_cli.profiling.dataset import read_dataset
from disttrain_cli.profiling.rows import cut_bytes, input_bytes
from disttrain_cli.profiling.sizes import PackedSizes, draw_sizes, with_work
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, RunFile
from tests.profiling.test_measure import MODULES, fewer  # noqa: F401

AUDIO: dict[str, Any] = {
    "kind": "encoder",
    "architecture": "whisper",
    "merge": 2,
    "config": {
        "d_model": 16,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "num_mel_bins": 4,
        "max_source_positions": 20,
    },
}
SIZES = {"image": [(4, 6), (8, 8)], "audio": 3, "documents": [[60, 40], [200]], "target": 3}


def make_run(folder: Path, clips: float = 3, **cluster: Any) -> Run:
    path = folder / "disttrain.yaml"
    path.write_text(
        RunFile.model_validate(
            {
                "name": "t",
                "model": {
                    "modules": {
                        "image_encoder": MODULES["image_encoder"],
                        "audio_encoder": AUDIO,
                        **{name: MODULES[name] for name in ("llm", "image_generator")},
                    }
                },
                "data": {
                    "distribution": {
                        "images_per_sequence": 1,
                        "generated_per_sequence": 1,
                        "clips_per_sequence": clips,
                        "sequences": 300,
                    },
                    "sequence_length": 256,
                    "max_image_pixels": 1024,
                },
                "cluster": {"nodes": 2, "gpus_per_node": 2} | cluster,
                "train": {"global_batch_size": 8, "steps": 1, "precision": "fp32"},
            }
        ).model_dump_json()
    )
    return Run(path=path, file=RunFile.model_validate_json(path.read_text()))


def test_bytes_of_side_by_side_encoders_equal_those_of_the_tensors(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, device="meta", **SIZES)
    work = {name: probe_work(inputs, name, **SIZES) for name in run.file.model.order}
    mean = {name: amount.scaled(0.5) for name, amount in work.items()}  # two sequences
    for module in work:
        apart, crossing = parallel_layers(table, inputs.llm, module), []
        line = [layer for index, layer in enumerate(table) if index not in apart]
        for place, layer in enumerate(line):
            if layer.module == module:
                read = state_at(line, place, inputs, batch, "meta")
                expected = sum(read[name].nbytes for name in layer.reads)
                assert input_bytes(layer, table, inputs, mean, 4)(work[module]) == pytest.approx(
                    expected
                )
                after = state_at(line, place + 1, inputs, batch, "meta")
                crossing.append(sum(tensor.nbytes for tensor in after.values()) / 2)
        assert cut_bytes(module, table, inputs, mean, 4) == pytest.approx(crossing)
    assert cut_bytes("audio_encoder", table, inputs, mean, 4)[-1] == 3 * 10 * 32 * 4 / 2


def test_draws_of_clips() -> None:
    mute, loud = PackedSizes([100]), PackedSizes([200], {"audio": [(1, 1)] * 2})
    assert {len(draw["audio"]) for draw in draw_sizes("audio", [loud])} == {1, 2, 4, 8}
    assert draw_sizes("audio", [mute]) == [] and with_work("audio", [mute, loud]) == [loud]
    assert all(
        len(draw["audio"]) == 2 * draw["documents"].count([200])
        for draw in draw_sizes("sequence", [mute, loud])
    )


def test_data_without_clips_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "SECONDS", 0.01)
    run = make_run(tmp_path, clips=0)
    with pytest.raises(DataError, match="no audio clip for audio_encoder") as error:
        read_dataset(run, describe(run))
    assert "clips_per_sequence" in error.value.next_step


def check(profile: Profile) -> None:
    ear = profile.modules["audio_encoder"]
    assert list(profile.modules) == ["image_encoder", "audio_encoder", "llm", "image_generator"]
    assert (ear.kind, ear.layers, ear.projector) == (
        "encoder",
        ["embed", *["block"] * 3, "projector"],
        [4],
    )
    assert ear.work_per_sequence == (3, 60, 1200) and set(ear.tp) == {"1", "2"}
    # Positions of 16 and then tokens of 32 numbers, 4 bytes each; nothing that the image encoder
    # made.
    assert ear.cut_bytes_per_sequence == [3 * 20 * 16 * 4] * 4 + [3 * 10 * 32 * 4]
    block = ear.costs["block"]
    assert all(
        shard.forward_ms(ear.work_per_sequence) > 0 < shard.backward_ms(ear.work_per_sequence)
        for shard in block.tp.values()
    )
    assert block.forward_flops(ear.work_per_sequence) == 3 * 20 * (
        2 * (4 * 16**2 + 2 * 16 * 32) + 4 * 20 * 16
    )
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.slow
def test_a_device_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "SECONDS", 0.01)
    profile = room.measure(make_run(tmp_path), "analytic:H800")
    check(profile)
    assert all(time.fit_error_pct < 1e-6 for time in profile.modules["audio_encoder"].tp.values())


@pytest.mark.slow
@pytest.mark.usefixtures("fewer")
def test_this_machine(tmp_path: Path) -> None:
    check(room.measure(make_run(tmp_path, nodes=1), "cpu"))
