"""A run goes on with other weights and more sources; one of other data, or another start, does
not."""

from dataclasses import replace
from pathlib import Path

import pytest

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.mixtures import Phases
from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.runtime.checkpoints.folder import Begun, begun, check_belongs, made_from
from disttrain_cli.runtime.checkpoints.phases import check_begins, phases_of
from disttrain_cli.spec.index import TEXT
from disttrain_cli.spec.profile import PhaseProfile, Profile
from tests.data.dataset import make_run
from tests.data.test_packing import make_index
from tests.planning import synthetic
from tests.runtime.checkpoints.test_folder import checkpoint

PAST: Phases = [(0, [1.0, 1.0]), (40, [2.0, 1.0]), (90, [1.0, 5.0])]


def indexed(sources: int, *phases: tuple[int, list[float]]) -> Index:
    index = make_index([[TEXT]], [[9]])
    return replace(index, of_sources=["a", "b", "c"][:sources], phases=list(phases))


def profiled(sources: list[str], phases: Phases) -> Profile:
    profile = synthetic.tiny(synthetic.run_file())
    phase_profiles = [PhaseProfile(step=step, weights=weights) for step, weights in phases]
    data = {"sources": sources, "phases": phase_profiles}
    return profile.model_copy(update={"data": profile.data.model_copy(update=data)})


@pytest.mark.parametrize(
    ("index", "phases"),
    [
        (indexed(2, (0, [1.0, 1.0]), (40, [2.0, 1.0])), PAST[:2]),  # nothing changed
        (indexed(2, (0, [9.0, 9.0]), (30, [2.0, 1.0])), PAST[:2]),  # nor what is drawn from now on
        (indexed(2, (0, [3.0, 1.0])), [*PAST[:2], (60, [3.0, 1.0])]),
        (indexed(3, (0, [2.0, 1.0, 0.5])), [*PAST[:2], (60, [2.0, 1.0, 0.5])]),
        (
            indexed(3, (0, [2.0, 1.0, 0.0]), (60, [1.0, 1.0, 1.0]), (70, [0.0, 0.0, 1.0])),
            [*PAST[:2], (60, [1.0, 1.0, 1.0]), (70, [0.0, 0.0, 1.0])],
        ),
    ],
)
def test_what_a_run_goes_on_with(tmp_path: Path, index: Index, phases: Phases) -> None:
    checkpoint(tmp_path, 60, dataset=["a", "b"], phases=PAST)
    before = begun(tmp_path)
    assert before == Begun(60, ["a", "b"], PAST[:2])
    assert phases_of(index, before) == (phases, 0 if phases == index.phases else 60)


def test_other_data_begin_anew(tmp_path: Path) -> None:
    checkpoint(tmp_path, 60, dataset=["a", "x"], phases=PAST)
    stated = (0, [3.0, 1.0]), (70, [1.0, 1.0])
    assert phases_of(indexed(2, *stated), begun(tmp_path)) == (list(stated), 0)
    assert phases_of(indexed(2, *stated), begun(tmp_path / "none")) == (list(stated), 0)


def test_which_checkpoint_belongs(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def said(profile: Profile) -> dict[str, object]:
        return {name: made_from(run, profile)[name] for name in ("dataset", "phases")}

    folder = checkpoint(tmp_path, 60, **said(profiled(["a", "b"], PAST)))
    later = [*PAST[:2], (60, [1.0, 1.0, 1.0])]
    for sources, phases in ((["a", "b"], PAST), (["a", "b", "c"], later), (["a", "b"], PAST[:2])):
        assert check_belongs(folder, said(profiled(sources, phases))) == 60
    for sources, phases, why in (
        (["a", "x"], PAST, "another dataset"),
        (["a"], PAST, "another dataset"),
        (["a", "b"], PAST[:1], "other weights"),
        (["a", "b"], [*PAST[:2], (59, [1.0, 1.0])], "other weights"),
        (["a", "b"], [(0, [1.0, 1.5]), *PAST[1:]], "other weights"),
    ):
        with pytest.raises(MismatchError, match=why):
            check_belongs(folder, said(profiled(sources, phases)))


def test_a_start_anew_needs_its_own_profile() -> None:
    profile = profiled(["a"], PAST)
    check_begins(profile)
    data = profile.data.model_copy(update={"goes_on_from": 60})
    with pytest.raises(SpecError, match="step 60") as error:
        check_begins(profile.model_copy(update={"data": data}))
    assert "resume=True" in (error.value.next_step or "")
