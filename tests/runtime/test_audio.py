"""A model that hears trains alike on every layout, encoders side by side and in a line (fp32,
1e-5)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_audio import TONES_HZ, tones
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints import folder as checkpoint_folder
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from tests.data.dataset import encoded, image, interleaved, text, write_tar
from tests.runtime.equivalence_worker import reference
from tests.runtime.factory import MODEL, plan_of, unit
from tests.runtime.layouts import train

STEPS = 2
EYE, EAR, LLM = "image_encoder", "audio_encoder", "llm"
WHISPER: dict[str, Any] = {
    "kind": "encoder",
    "architecture": "whisper",
    "merge": 5,
    "config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "dropout": 0.2,
        "activation_dropout": 0.1,
    },
}


def write_heard(path: Path, samples: int = 60) -> None:
    """Texts with images and clips in any order; some with neither, or with one of them only."""
    random, files = np.random.default_rng(3), []
    for number in range(samples):
        key, segments = (
            f"{number:03d}",
            [text(f"Sample {number}. " + "word " * int(random.integers(1, 20)))],
        )
        for place in range(int(random.choice([0, 1, 2, 3]))):
            if random.random() < 0.5:
                name = f"{key}.{place}.wav"
                heard = [
                    str(one)
                    for one in random.choice(list(TONES_HZ), size=int(random.integers(1, 4)))
                ]
                files.append((name, tones(heard, 16_000, random)))
                segments.append({"type": "audio", "file": name})
            else:
                name = f"{key}.{place}.jpg"
                files.append(
                    (name, encoded(*random.integers(16, 60, size=2).tolist(), shade=number))
                )
                segments.append(image(name))
            segments.append(text(f"after {place}"))
        files.append(interleaved(key, *segments))
    write_tar(path, files)


def write_run(
    folder: Path, data: Path, encoders: dict[str, Any], trained: list[str] | None = None
) -> Run:
    """A run of these encoders before the tests' LLM."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": folder.name,
        "model": {"modules": encoders | {LLM: MODEL["modules"][LLM]}, "trained": trained},
        "data": {
            "sources": [{"path": str(data)}],
            "sequence_length": 256,
            "max_image_pixels": 2048,
        },
        "cluster": {"gpus_per_node": 4, "device": "cpu"},
        "train": {
            "global_batch_size": 4,
            "steps": STEPS,
            "precision": "fp32",
            "zero_stage": 0,
            "gradient_clipping": 0.5,
            "ordering": "none",
            "optimizer": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01},
        },
    }
    path = folder / "disttrain.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(path)
    build_index(run, describe(run))
    return run


def _shared(modules: list[str], layers: list[int], cp: int) -> UnitPlan:
    """A unit whose ranks share the rows of clips or sequences."""
    one = unit("-".join(modules), modules, layers)
    return one.model_copy(update={"cp": cp, "gpus": cp * one.gpus})


def _layouts(run: Run) -> dict[str, list[UnitPlan]]:
    """By name, units on four ranks."""
    modules = [info.module for info in layer_table(run)]
    v, a, m = (modules.count(name) for name in (EYE, EAR, LLM))
    if not v:
        return {
            "only hearing 2-2": [unit("ear", [EAR], [a], 2), unit("llm", [LLM], [m], 2)],
            "only hearing cp2-cp2": [_shared([EAR], [a], 2), _shared([LLM], [m], 2)],
            "only hearing cp2 pp2": [_shared([EAR, LLM], [a, m], 2)],
            "only hearing cp4": [_shared([EAR, LLM], [a + m], 4)],
        }
    eye, ear, llm = unit("eye", [EYE], [v]), unit("ear", [EAR], [a]), unit("llm", [LLM], [m])
    return {
        "1+1-2": [eye, ear, unit("llm", [LLM], [m], 2)],
        "1+2-1": [eye, unit("ear", [EAR], [a], 2), llm],
        "1+pp2-1": [eye, unit("ear", [EAR], [1, a - 1]), llm],
        "pp2+1-1": [unit("eye", [EYE], [1, v - 1]), ear, llm],
        "1+tp2-1": [eye, unit("ear", [EAR], [a], tp=2), llm],
        "1+cp2-1": [eye, _shared([EAR], [a], 2), llm],
        "1+1-tp2": [eye, ear, unit("llm", [LLM], [m], tp=2)],
        "both-pp2-2": [unit("both", [EYE, EAR], [v + 1, a - 1]), unit("llm", [LLM], [m], 2)],
        "1-with the LLM": [unit("eye", [EYE], [v], 2), unit("rest", [EAR, LLM], [a, m])],
        "monolithic pp2 dp2": [unit("all", [EYE, EAR, LLM], [v + 1, a + m - 1], 2)],
        "monolithic pp4": [unit("all", [EYE, EAR, LLM], [v, 1, a, m - 1])],
    }


CASES = [
    "1+1-2",
    "1+2-1",
    "1+pp2-1",
    "pp2+1-1",
    "1+tp2-1",
    "1+cp2-1",
    "1+1-tp2",
    "both-pp2-2",
    "1-with the LLM",
    "monolithic pp2 dp2",
    "monolithic pp4",
    "only hearing 2-2",
    "only hearing cp2-cp2",
    "only hearing cp2 pp2",
    "only hearing cp4",
    "frozen 1+1-2",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks train every layout in the same processes; references train alone. By case: (out,
    reference)."""
    folder = tmp_path_factory.mktemp("audio")
    write_heard(folder / "data" / "heard.tar")
    both = {EYE: MODEL["modules"][EYE], EAR: WHISPER}
    seeing = write_run(folder / "both", folder / "data", both)
    hearing = write_run(folder / "ear", folder / "data", {EAR: WHISPER})
    frozen = write_run(folder / "frozen", folder / "data", both, [EYE, LLM, "projectors"])
    cases = [
        (name, run, units) for run in (seeing, hearing) for name, units in _layouts(run).items()
    ]
    cases.append(("frozen 1+1-2", frozen, _layouts(frozen)["1+1-2"]))
    plans = [(name, run, plan_of(run, units, 1)) for name, run, units in cases]
    out = train(plans, STEPS, folder)
    references = {id(run): reference(run, STEPS) for run in (seeing, hearing, frozen)}
    return {name: (out / name, references[id(run)]) for name, run, _ in cases}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    out, (history, parameters, _) = runs[name]
    assert torch.allclose(
        torch.tensor(json.loads((out / "history.json").read_text())),
        torch.tensor(history),
        rtol=1e-5,
        atol=1e-5,
    )
    saved = checkpoint_folder.latest(out / "checkpoints")
    assert saved is not None
    weights = checkpoint.read_tensors(saved)
    assert len(weights) == len(parameters)
    for key, expected in parameters.items():
        assert torch.allclose(weights[f"weight/{key}"], expected, rtol=1e-5, atol=1e-5), key


@pytest.mark.slow
def test_the_layouts_were_given_every_mix_of_modalities(runs: dict[str, Any]) -> None:
    mixes = {
        (place in slot.items["image"].sequence, place in slot.items["audio"].sequence)
        for slot in (order.slots[0] for order in runs["1+1-2"][1][2])
        for place in range(len(slot.sequences))
    }
    assert (True, True) in mixes and len(mixes) > 1
