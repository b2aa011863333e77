"""Flows over joint attention, SD3's, Flux's, Lumina 2's and Qwen-Image's, and FLUX.2 as one layer,
in layouts of four ranks: losses, gradient norms and weights equal a single process (fp32, 1e-5),
with VAEs in the pipeline and with latents that were prepared."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.runtime.latents import make_latents
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.equivalence_worker import check_equals, reference
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.layouts import train

RANKS, STEPS, BATCH, SEED, DRAWN = 4, 3, 4, 16, 8
LLM, PAINTER, MURAL, FRESCO = "llm", "painter", "mural", "fresco"
SCROLL, POSTER = "scroll", "poster"
DRAWING = [PAINTER, MURAL, FRESCO, SCROLL, POSTER]
#: Layers of the LLM, and of the generators, three of them with a VAE.
COUNTS = (5, 7 + 6 + 8 + 5 + 3)
UNREAD = {
    f"{PAINTER}.block.2": ("attn.add_q_proj.bias", "attn.norm_added_q.weight"),
    f"{SCROLL}.block.1": (
        *("attn.add_q_proj.bias", "attn.norm_added_q.weight"),
        *("attn.to_add_out.weight", "attn.to_add_out.bias"),
        *("txt_mlp.net.0.proj.weight", "txt_mlp.net.0.proj.bias"),
        *("txt_mlp.net.2.weight", "txt_mlp.net.2.bias"),
    ),
}


def _cut(draw: random.Random, layers: int, stages: int) -> list[int]:
    ends = sorted(draw.sample(range(1, layers), stages - 1))
    return [stop - start for start, stop in zip([0, *ends], [*ends, layers], strict=True)]


def _one(draw: random.Random, name: str, modules: list[str], layers: int, gpus: int) -> UnitPlan:
    tp, dp, pp = draw.choice(
        [(a, b, gpus // a // b) for a in (1, 2, 4) for b in (1, 2, 4) if gpus % (a * b) == 0]
    )
    made = unit(name, modules, _cut(draw, layers, pp), dp, tp)
    delays = [draw.choice([0, 0, 1]) for _ in range(pp)]
    recomputed = draw.random() < 0.25
    return made.model_copy(
        update={
            "checkpointing": recomputed,
            "tp_overlap": tp > 1 and draw.random() < 0.5,
            "weight_delay": None if recomputed or draw.random() < 0.5 else delays,
        }
    )


def layouts() -> dict[str, tuple[list[UnitPlan], int, bool]]:
    """Name → (units, ZeRO stage, whether latents were prepared); all four ranks are used."""
    draw, found = random.Random(SEED), dict[str, tuple[list[UnitPlan], int, bool]]()
    while len(found) < DRAWN:
        apart = draw.random() < 0.6
        cached = draw.random() < 0.3
        counts = (COUNTS[0], COUNTS[1] - cached)
        units = (
            [_one(draw, "l", [LLM], counts[0], 2), _one(draw, "g", DRAWING, counts[1], 2)]
            if apart
            else [_one(draw, "all", [LLM, *DRAWING], sum(counts), RANKS)]
        )
        zero = draw.choice([0, 1])
        words = [
            f"{u.name}.tp{u.tp}.dp{u.dp}.{'+'.join(map(str, u.layers_per_stage))}"
            + f"{'.recomputed' if u.checkpointing else ''}{'.overlapped' if u.tp_overlap else ''}"
            + f"{'.later' if u.weight_delay else ''}"
            for u in units
        ]
        name = f"{'_'.join(words)}-zero{zero}{'-cached' if cached else ''}"
        found[name] = (units, zero, cached)
    return found


LAYOUTS = layouts()


def written(folder: Path, data: Path, cached: bool = False, **train: Any) -> Run:
    run = write_run(folder, data, modules=(LLM, *DRAWING), global_batch_size=BATCH, **train)
    if cached:
        content = yaml.safe_load(run.path.read_text())
        content["model"]["modules"][PAINTER]["cached_latents"] = True
        run.path.write_text(yaml.safe_dump(content))
        run = read_run(run.path)
    build_index(run, describe(run), silent)
    if cached:
        make_latents(run, silent)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks train every layout in the same processes; the reference trains alone."""
    folder = tmp_path_factory.mktemp("flow")
    write_sample_data(folder / "data")
    cases = []
    for name, (units, zero_stage, cached) in LAYOUTS.items():
        run = written(folder / name, folder / "data", cached, name="flow", zero_stage=zero_stage)
        cases.append((name, run, plan_of(run, units, 1)))
    alone = written(folder / "alone", folder / "data", name="flow")
    out = train(cases, STEPS, folder)
    return {"out": out, "run": alone, "reference": reference(alone, STEPS)[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    history, parameters = runs["reference"]
    if LAYOUTS[name][2]:  # no VAE is there
        parameters = {key: value for key, value in parameters.items() if "vae_encoder" not in key}
    check_equals(runs["out"] / name, history, parameters)


@pytest.mark.slow
def test_all_weights_move_but_positions_and_the_vae(runs: dict[str, Any]) -> None:
    run, (_, parameters) = runs["run"], runs["reference"]
    still = {
        f"{layer.name}/{path}"
        for layer in build_layers(run, 0, len(layer_table(run)))
        for path, before in layer.named_parameters()
        if torch.equal(before, parameters[f"{layer.name}/{path}"])
    }
    # what the last block makes of the conditioning leads nowhere, in diffusers as here
    unread = {f"{layer}/block.{name}" for layer, names in UNREAD.items() for name in names}
    positions = {f"{PAINTER}.in/pos_embed.pos_embed"}
    assert {name for name in still if "vae_encoder/" not in name} == positions | unread
