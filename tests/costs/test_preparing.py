"""Preparing what a stage loads: rates by hand, where modules begin, and what is not known."""

import numpy as np
import pytest

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.costs.preparing import item_s, prepare_s
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import PreprocessProfile, Profile
from tests.heads import with_heads
from tests.planning import synthetic
from tests.planning.test_predict import three

PROFILE = synthetic.tiny(synthetic.run_file())


def with_rates(images: float, sequences: float, profile: Profile = PROFILE) -> Profile:
    return profile.model_copy(
        update={
            "preprocess": PreprocessProfile(
                images_per_s_per_core=images, sequences_per_s_per_core=sequences
            )
        }
    )


def mean_images(targets: bool = True) -> float:
    """Images of a mean sequence of the data, read and, if wanted, to generate."""
    return (PROFILE.data.images + targets * PROFILE.data.targets) / PROFILE.data.sequences


def test_stages_load_for_the_modules_that_begin_on_them() -> None:
    assert [stage.begins for stage in stages_of(PROFILE, three())] == [
        ["image_encoder"],
        ["llm"],
        [],
        ["image_generator"],
        [],
    ]
    everything = UnitPlan(
        name="all", modules=list(PROFILE.modules), dp=2, pp=2, gpus=4, layers_per_stage=[5, 9]
    )
    one = Layout(
        global_batch_size=24, microbatch_size=2, microbatches=6, gpus_used=4, units=[everything]
    )
    stages = stages_of(PROFILE, one)
    assert [stage.begins for stage in stages] == [["image_encoder", "llm"], ["image_generator"]]
    loads = synthetic.loads_of(PROFILE, one, synthetic.paper_policy(PROFILE, one), 0)
    profile = with_rates(images=100, sequences=10)
    expected = loads["image_encoder"][..., 0] / 100 + loads["llm"][..., 0] * (
        0.1 - mean_images() / 100
    )
    np.testing.assert_allclose(prepare_s(profile, stages[0], loads, 1), expected)
    own = {cost.module: loads[cost.module][:, :1] for cost in stages[1].costs}  # of one replica
    assert "image_encoder" not in own
    np.testing.assert_allclose(
        prepare_s(profile, stages[1], own, 1), own["image_generator"][..., 0] / 100
    )


def test_times_by_hand() -> None:
    stages = stages_of(PROFILE, three())
    loads = {
        "image_encoder": np.zeros((6, 2, 3)),
        "llm": np.zeros((6, 2, 3)),
        "image_generator": np.zeros((6, 1, 3)),
    }
    loads["image_encoder"][1, 0] = 8, 320, 9  # of which only the eight images count
    loads["llm"][2, 1, 0], loads["image_generator"][3, 0, 0] = 2, 5
    profile = with_rates(images=100, sequences=10)
    encoder_s, llm_s, rest_s, generator_s, _ = (
        prepare_s(profile, stage, loads, workers=4) for stage in stages
    )
    assert (
        encoder_s.shape == (6, 2)
        and encoder_s[1, 0] == pytest.approx(8 / 100 / 4)
        and encoder_s.sum() < 0.0201
    )
    assert (
        llm_s[2, 1] == pytest.approx(2 * (0.1 - mean_images() / 100) / 4)
        and llm_s.sum() == llm_s[2, 1]
    )
    assert (
        not rest_s.any()
        and generator_s.shape == (6, 1)
        and generator_s[3, 0] == pytest.approx(5 / 100 / 4)
    )


def test_text_never_takes_less_than_nothing_and_unknown_rates_take_nothing() -> None:
    # the images alone take longer
    assert item_s(with_rates(images=1.0, sequences=10.0), "llm") == 0.0
    # nothing but rounding
    assert item_s(with_rates(images=300.0, sequences=300.0 / mean_images()), "llm") == 0.0
    assert item_s(with_rates(images=0.0, sequences=10.0), "llm") == 0.1
    assert [
        item_s(with_rates(images=0.0, sequences=0.0), module) for module in PROFILE.modules
    ] == [0.0] * 3
    assert item_s(with_rates(images=5.0, sequences=0.0), "image_generator") == 0.2


def test_clips_take_their_own_time_and_none_of_the_text_s() -> None:
    heard = synthetic.with_audio(PROFILE)
    data = heard.data.model_copy(update={"clips": 3 * heard.data.sequences})
    rates = PreprocessProfile(
        images_per_s_per_core=100, clips_per_s_per_core=200, sequences_per_s_per_core=10
    )
    profile = heard.model_copy(update={"data": data, "preprocess": rates})
    assert item_s(profile, "audio_encoder") == 1 / 200
    assert item_s(profile, "llm") == pytest.approx(0.1 - mean_images() / 100 - 3 / 200)


def test_cached_latents_and_clips_of_no_known_rate_take_nothing() -> None:
    inputs = PROFILE.inputs
    assert inputs.target is not None
    cached = PROFILE.model_copy(
        update={
            "inputs": with_heads(
                inputs, "target", inputs.target.model_copy(update={"cached_latents": True})
            )
        }
    )
    profile = with_rates(100, 10, cached)
    assert item_s(profile, "image_generator") == 0.0 and item_s(profile, "image_encoder") == 0.01
    assert item_s(profile, "llm") == pytest.approx(0.1 - mean_images(targets=False) / 100)
    assert item_s(with_rates(100, 10, synthetic.with_audio(PROFILE)), "audio_encoder") == 0.0
