"""Drift of the data: chance is no drift, a mean that moved is named with the step it began."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.data.drift import RECENT_STEPS, drift
from disttrain_cli.spec.profile import PhaseProfile, SizeSample
from tests.planning import synthetic

BATCH = 64
PROFILE = synthetic.tiny(synthetic.run_file())


def drawn(random, count, images=3.0, tokens=200.0, targets=1.0, patches=40.0):
    """Skewed sizes of that many sequences: negative binomial counts, as web documents have."""
    read, made = (random.negative_binomial(2, 2 / (2 + mean), count) for mean in (images, targets))
    return SizeSample(
        tokens=np.minimum(256, random.gamma(4, tokens / 4, count)).astype(int).tolist(),
        length_sq=random.integers(10_000, 30_000, count).tolist(),
        targets=made.tolist(),
        images=[random.poisson(patches, number).tolist() for number in read],
    )


def steps_of(random, counts, **sizes):
    rows = []
    for step in range(counts):
        batch = drawn(random, BATCH, **sizes)
        rows.append(
            {
                "step": step,
                "sequences": BATCH,
                "tokens": sum(batch.tokens),
                "images": sum(len(own) for own in batch.images),
                "targets": sum(batch.targets),
            }
        )
    return rows


def profile_of(random, count=512, **sizes):
    return PROFILE.model_copy(
        update={"data": PROFILE.data.model_copy(update={"sample": drawn(random, count, **sizes)})}
    )


def test_equal_data_do_not_drift():
    """Three means judged in 300 runs: at |z| > 4 chance alone would show once in 5000."""
    found = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        found += len(drift(profile_of(random, 128), steps_of(random, 4), drawn(random, 64)))
    assert found <= 3


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    factor=st.sampled_from([0.5, 1.6, 2.5]),
    what=st.sampled_from(["images", "targets", "patches"]),
)
def test_a_mean_that_moved_is_named(seed, factor, what):
    random = np.random.default_rng(seed)
    profile = profile_of(random)
    moved = {what: {"images": 3.0, "targets": 1.0, "patches": 40.0}[what] * factor}
    found = drift(profile, steps_of(random, 40, **moved), drawn(random, 512, **moved))
    name = {
        "images": "images read per sequence",
        "targets": "images generated per sequence",
        "patches": "patches per image",
    }[what]
    assert [one.what for one in found] == [name]
    assert found[0].seen / found[0].planned == pytest.approx(factor, rel=0.3)
    assert found[0].change_pct == pytest.approx(100 * (found[0].seen / found[0].planned - 1))
    assert np.sign(found[0].z) == np.sign(factor - 1)
    assert found[0].sentence.startswith(
        f"The data have {found[0].seen:.3g} {name} instead of the planned"
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), begins=st.integers(4, 20))
def test_the_step_from_which_on_it_is_so(seed, begins):
    random = np.random.default_rng(seed)
    rows = steps_of(random, begins) + [
        row | {"step": row["step"] + begins} for row in steps_of(random, 30, images=9.0)
    ]
    found = drift(profile_of(random), rows)
    assert [one.what for one in found] == ["images read per sequence"]
    assert found[0].from_step == begins
    assert found[0].sentence.endswith(f", from step {begins} on")


def test_only_what_is_read_now_counts():
    """A hundred steps of other data are over after as many of the plan's own as are judged."""
    random = np.random.default_rng(1)
    early = steps_of(random, 60, images=9.0)
    assert drift(profile_of(random), [*early, *steps_of(random, 2)])
    assert not drift(profile_of(random), [*early, *steps_of(random, 60 + RECENT_STEPS)])


def test_what_the_plan_never_saw_has_no_percentage():
    random = np.random.default_rng(2)
    found = drift(profile_of(random, targets=1e-9), steps_of(random, 10))
    assert [(one.what, one.planned, one.change_pct) for one in found] == [
        ("images generated per sequence", 0.0, None)
    ]
    assert "the planned 0" in found[0].sentence


def test_nothing_to_judge_is_no_drift():
    assert drift(PROFILE, []) == []
    assert drift(PROFILE, [], SizeSample(tokens=[], length_sq=[], images=[], targets=[])) == []


def test_a_phase_is_judged_by_its_own_sizes():
    """Other weights change the data, as the profile says they will."""
    random = np.random.default_rng(3)
    early, late = drawn(random, 512, images=3), drawn(random, 512, images=9)
    profile = profile_of(random)
    phases = [
        PhaseProfile(step=0, weights=[1, 0]),
        PhaseProfile(step=60, weights=[0, 1], sample=late),
    ]
    data = profile.data.model_copy(update={"sample": early, "phases": phases})
    planned = profile.model_copy(update={"data": data})
    steps = steps_of(random, 60, images=3) + [
        step | {"step": 60 + step["step"]} for step in steps_of(random, 30, images=9)
    ]
    assert not drift(planned, steps) and not drift(planned, steps[:60])
    stayed = steps_of(random, 90, images=3)
    (moved,) = drift(planned, stayed)
    assert moved.what == "images read per sequence" and moved.planned == pytest.approx(9, abs=1)
