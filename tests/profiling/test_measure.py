"""The whole measurement, small: real data, a small model, two processes; and a model without
images."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.errors import DataError
from disttrain_cli.profiling import measure as room
from disttrain_cli.profiling.records import Record, record_name, records_path
from disttrain_cli.profiling.worker import Variant
from disttrain_cli.spec.profile import Profile, read_profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.work import Work

MODULES: dict[str, Any] = {
    "image_encoder": {
        "kind": "encoder",
        "architecture": "vit",
        "merge": 2,
        "config": {
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "patch_size": 8,
        },
    },
    "llm": {
        "kind": "llm",
        "architecture": "llama",
        "config": {
            "vocab_size": 272,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "tie_word_embeddings": False,
        },
    },
    "image_generator": {
        "kind": "generator",
        "architecture": "unet2d_condition",
        "image_size": 8,
        "context_tokens": 4,
        "config": {
            "in_channels": 3,
            "out_channels": 3,
            "layers_per_block": 1,
            "block_out_channels": [8, 16],
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "cross_attention_dim": 16,
            "attention_head_dim": 8,
            "norm_num_groups": 4,
        },
    },
}


def run_file(folder: Path, data: Path, modules: list[str], processes: int) -> Run:
    path = folder / "disttrain.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "model": {"modules": {name: MODULES[name] for name in modules}},
                "data": {
                    "sources": [
                        {"path": str(data / "captions")},
                        {"path": str(data / "interleaved")},
                    ],
                    "sequence_length": 256,
                    "max_image_pixels": 4096,
                    "max_bad_fraction": 0.1,
                },
                "cluster": {"gpus_per_node": processes, "device": "cpu"},
                "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"},
            }
        )
    )
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
        patch.setattr("disttrain_cli.profiling.measure.FEWER", 8)
        yield


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, data: Path, fewer: None
) -> tuple[Run, Profile]:
    run = run_file(tmp_path_factory.mktemp("run"), data, list(MODULES), processes=2)
    return run, room.measure(run, "auto")


@pytest.mark.slow
class TestThreeModules:
    def test_survives_the_way_through_its_file(
        self, measured: tuple[Run, Profile], tmp_path: Path
    ) -> None:
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
                assert cost.tp["1"].parameters == cost.parameters
                assert cost.backward_input_flops(work) <= cost.backward_flops(work)
            assert module.parameters == sum(module.costs[kind].parameters for kind in module.layers)
            block = module.costs[module.layers[2]]
            assert (
                0.0
                < block.tp["1"].frozen_activation_bytes(work)
                < block.tp["1"].activation_bytes(work)
            )
            assert block.tp["1"].backward_input_ms(work) > 0.0
            assert 0.0 < block.tp["1"].input_bytes(work) < block.tp["1"].activation_bytes(work)
            assert module.max_work_per_sequence.items >= work.items > 0.0

    def test_tp_shards_hold_less_and_send_messages(self, measured: tuple[Run, Profile]) -> None:
        _, profile = measured
        links = profile.links
        message_us = min(links.all_reduce_us, links.all_gather_us, links.reduce_scatter_us)
        for module in profile.modules.values():
            assert list(module.tp) == ["1", "2"]
            for cost in module.costs.values():
                assert list(cost.tp) == ["1", "2"]
                if cost.tp["2"].sent_bytes:
                    assert cost.tp["2"].parameters < cost.parameters
                    assert cost.tp["2"].forward_ms.base >= 1e-3 * message_us
        block = profile.modules["llm"].costs["block"]
        rows = 256 * 32 * 4 / 2  # that move over a link for [256 rows, 32] in fp32
        sent = {name: size(Work(items=1)) / rows for name, size in block.tp["2"].sent_bytes.items()}
        assert sent == pytest.approx(
            {
                "forward": 4,
                "backward": 6,
                "backward_input": 4,
                "recomputing": 7,
                "recomputing_overlapped": 9,
            }
        )

    def test_says_which_layers_join_the_modules(self, measured: tuple[Run, Profile]) -> None:
        _, profile = measured
        assert [module.projector for module in profile.modules.values()] == [[4], [], [0]]
        assert all(module.frozen == [] for module in profile.modules.values())

    def test_keeps_the_sizes_of_sequences(self, measured: tuple[Run, Profile]) -> None:
        _, profile = measured
        sample = profile.data.sample
        assert len(sample.tokens) == min(1024, profile.data.sequences)
        assert max(sample.tokens) <= 256 and sum(sample.targets) > 0

    def test_states_its_budget_and_what_was_measured(self, measured: tuple[Run, Profile]) -> None:
        measuring = measured[1].measuring
        assert measuring is not None and measuring.clock == "cpu"
        assert 5.0 <= measuring.budget_s <= 30.0
        assert 0.0 < measuring.started_s < measuring.spent_s
        assert measuring.sizes.keys() == measured[1].modules.keys()
        assert not measuring.not_measured
        assert all(
            4 <= done <= drawn
            for by_tp in measuring.sizes.values()
            for done, drawn in by_tp.values()
        )

    def test_measures_the_optimizer(self, measured: tuple[Run, Profile]) -> None:
        assert 0.0 < measured[1].device.optimizer_ns_per_parameter < 1e4

    def test_layers_are_kept_for_a_cluster_of_another_size(
        self, measured: tuple[Run, Profile]
    ) -> None:
        run, _ = measured
        stored = json.loads(records_path(run).read_text())
        assert stored["records"] and stored["completed_for"] == run.file.cluster.figures()

    def test_more_work_takes_more_time(self, measured: tuple[Run, Profile]) -> None:
        _, profile = measured
        block = profile.modules["llm"].costs["block"].tp["1"].backward_ms
        one = profile.modules["llm"].work_per_sequence
        assert block(one.scaled(8.0)) > 1.5 * block(one)
        assert block(Work()) >= 0.0

    def test_counts_the_devices_and_what_crosses_the_modules_ends(
        self, measured: tuple[Run, Profile]
    ) -> None:
        run, profile = measured
        assert (profile.device.kind, profile.device.count, profile.device.shared_by) == (
            "cpu",
            2,
            2,
        )
        encoder, generator = profile.modules["image_encoder"], profile.modules["image_generator"]
        assert encoder.output_bytes_per_sequence == pytest.approx(
            encoder.work_per_sequence.tokens / 4 * 32 * 4
        )
        targets = generator.work_per_sequence.items
        assert profile.modules["llm"].output_bytes_per_sequence == pytest.approx(
            targets * 4 * 32 * 4
        )
        assert generator.output_bytes_per_sequence == 0.0
        assert profile.fingerprints.model == run.file.model_fingerprint()
        assert (
            profile.preprocess.images_per_s_per_core > 0.0
            and profile.preprocess.sequences_per_s_per_core > 0.0
        )
        assert profile.provenance["torch"] and profile.provenance["date"]


def stored(run: Run) -> dict[str, Any]:
    return dict(json.loads(records_path(run).read_text())["records"])


@pytest.mark.slow
def test_an_interrupted_profile_goes_on(
    tmp_path: Path, data: Path, fewer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_file(tmp_path, data, ["llm"], processes=2)

    class Interrupted(Exception):
        pass

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("measure links") and done:
            raise Interrupted

    monkeypatch.setattr("disttrain_cli.profiling.device.gemm_peak_tflops", lambda precision: 0.1)
    monkeypatch.setattr("disttrain_cli.profiling.processes.SAVE_S", 0.2)
    monkeypatch.setattr("disttrain_cli.profiling.worker.REPORT_S", 0.1)
    with pytest.raises(Interrupted):
        room.measure(run, "cpu", interrupt)
    said: list[str] = []
    before = len(stored(run))
    with monkeypatch.context() as small:
        small.setattr("disttrain_cli.profiling.processes.CPU_S", 0.1)
        profile = room.measure(run, "cpu", lambda what, done, total: said.append(what))
    assert any(f"{before} sizes reused" in line for line in said)
    assert profile.provenance["continued"].startswith(f"{before} of ")
    assert profile.measuring and profile.measuring.not_measured == {"llm": ["2"]}
    whole = room.measure(run, "cpu")  # goes on with what the budget left out
    assert whole.measuring and not whole.measuring.not_measured
    assert whole.provenance["continued"].startswith(f"{profile.measuring.counts[0]} of ")
    again = room.measure(run, "cpu")  # complete for this cluster: measured again
    assert "continued" not in again.provenance
    cluster = run.file.cluster.model_copy(update={"memory_gib": 3.0})
    other = Run(path=run.path, file=run.file.model_copy(update={"cluster": cluster}))
    resized = room.measure(other, "cpu")
    assert again.measuring and resized.measuring
    measured, _ = again.measuring.counts
    assert resized.provenance["continued"].startswith(f"{measured} of ")
    assert resized.measuring.counts[0] >= measured and resized.device.memory_gib == 3.0


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


def test_a_largest_size_that_does_not_fit_leaves_no_tp_size_out() -> None:
    """Of the sizes measured regardless of the budget, a fit needs the smallest and a larger one."""
    draws = [0, 4, 1, 2, 3]
    variants = [
        Variant("llm", tp, frozen, draws, draws[:3], [])
        for tp in (1, 2)
        for frozen in (False, True)
    ]
    record: Record = {"times": {}, "kept_bytes": {}}
    names = [
        record_name("llm", one.frozen, draw, tp=one.tp)
        for one in variants
        for draw in draws
        if draw != 4
    ]
    request: Any = SimpleNamespace(variants=variants)
    measured: Any = SimpleNamespace(records=dict.fromkeys(names, record))
    assert room._counts(request, measured, "llm") == {"1": (8, 10), "2": (8, 10)}
    for one in variants:
        measured.records.pop(record_name("llm", one.frozen, 1, tp=one.tp))
    assert room._counts(request, measured, "llm") == {"1": (0, 10), "2": (0, 10)}
