"""A generator over images of several sizes in layouts of four ranks: losses, gradient norms and
weights equal a single process (fp32, 1e-5), with a VAE in the pipeline and with latents that were
prepared."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data import sample_data
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.latents import make_latents
from disttrain_cli.spec.index import TARGET
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.commands.test_train import call
from tests.runtime.equivalence_worker import check_equals, reference
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.layouts import train

RANKS, STEPS, BATCH = 4, 3, 4
LLM, PAINTER = "llm", "painter"
BUCKETS = [[24, 24], [32, 16], [16, 32]]


def _later(one: UnitPlan, **update: Any) -> UnitPlan:
    return one.model_copy(update=update)


#: Name → (units, ZeRO stage, whether latents were prepared); all four ranks are used.
LAYOUTS: dict[str, tuple[list[UnitPlan], int, bool]] = {
    "tp": ([unit("l", [LLM], [5], 2, 1), unit("g", [PAINTER], [7], 1, 2)], 1, False),
    "cut-recomputed": (
        [
            unit("l", [LLM], [5], 1, 2),
            _later(unit("g", [PAINTER], [1, 6], 1, 1), checkpointing=True),
        ],
        0,
        False,
    ),
    "one-unit-later": (
        [_later(unit("all", [LLM, PAINTER], [6, 6], 1, 2), weight_delay=[1, 0])],
        1,
        False,
    ),
    "cached-dp": ([unit("l", [LLM], [2, 3], 1, 1), unit("g", [PAINTER], [6], 2, 1)], 1, True),
}


def written(folder: Path, data: Path, cached: bool = False, **train: Any) -> Run:
    run = write_run(folder, data, modules=(LLM, PAINTER), global_batch_size=BATCH, **train)
    content = yaml.safe_load(run.path.read_text())
    content["model"]["modules"][PAINTER] |= {"buckets": BUCKETS, "cached_latents": cached}
    run.path.write_text(yaml.safe_dump(content))
    run = read_run(run.path)
    index = build_index(run, describe(run), silent)
    grids = {tuple(grid) for grid in index.grids[index.kinds == TARGET].tolist()}
    assert grids == {(6, 6), (4, 8), (8, 4)}
    if cached:
        make_latents(run, silent)
    return run


def write_data(folder: Path) -> None:
    """The sample data with images to generate of any aspect ratio."""
    scan = sample_data.scan_jpeg

    def of_any_size(data: Any, random: Any, most_tokens: int, square: bool = False) -> Any:
        return scan(data, random, most_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_data, "scan_jpeg", of_any_size)
        sample_data.write_sample_data(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks train every layout in the same processes; the reference trains alone."""
    folder = tmp_path_factory.mktemp("buckets")
    write_data(folder / "data")
    cases = []
    for name, (units, zero_stage, cached) in LAYOUTS.items():
        run = written(folder / name, folder / "data", cached, name="sizes", zero_stage=zero_stage)
        cases.append((name, run, plan_of(run, units, 1)))
    out = train(cases, STEPS, folder)
    alone = written(folder / "alone", folder / "data", name="sizes")
    return {"out": out, "reference": reference(alone, STEPS)[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    history, parameters = runs["reference"]
    if LAYOUTS[name][2]:  # no VAE is there
        parameters = {key: value for key, value in parameters.items() if "vae_encoder" not in key}
    check_equals(runs["out"] / name, history, parameters)


@pytest.mark.slow
def test_images_are_priced_and_planned_by_their_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data")
    run = written(tmp_path, tmp_path / "data", name="sizes", steps=2)
    content = yaml.safe_load(run.path.read_text())
    content["cluster"] = {"nodes": 1, "gpus_per_node": 2}
    run.path.write_text(yaml.safe_dump(content))
    for words in (("profile", "--device", "analytic:A800"), ("plan",)):
        code, out, err = call([*words, "--json"], capsys)
        assert code == 0, f"{words}: {out}\n{err}"
    profile = json.loads(run.dir.profile.read_text())
    areas = {area for of_one in profile["data"]["sample"]["target_areas"] for area in of_one}
    assert areas == {32, 36}
    items, patches, _ = profile["modules"][PAINTER]["work_per_sequence"]
    assert 32 < patches / items < 36
