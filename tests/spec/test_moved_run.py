"""A run whose folder moved, with the published model in it: the processor is the same."""

from pathlib import Path

import pytest

from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.files import fingerprint, identity
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_images import LibraryImages
from disttrain_cli.spec.library_processor import digest_of
from disttrain_cli.spec.profile import profile_of
from disttrain_cli.spec.whole import write_whole
from tests.planning.synthetic import run_file, tiny
from tests.whole_models import run_of, write_llava


def inputs_of(folder: Path, digest: str = "of its files") -> ModelInputs:
    head = LibraryImages(module="image_encoder", image_token=3, folder=str(folder), digest=digest)
    return ModelInputs(llm="llm", vocabulary=10, sequence_length=32, heads=[head])


def test_the_place_of_a_processor_is_no_part_of_what_it_computes() -> None:
    before, after = (inputs_of(Path(f"/{place}/model")) for place in ("before", "after"))
    assert before != after and before.moved(Path("/after/model")) == after
    assert before.fingerprint() == after.fingerprint() and identity(before) == identity(after)
    assert ModelInputs.model_validate_json(after.model_dump_json()) == after
    assert before.fingerprint() != inputs_of(Path("/before/model"), "of others").fingerprint()


def test_a_processors_identity_covers_its_videos_and_its_chat_template(tmp_path: Path) -> None:
    digests = {digest_of(tmp_path)}
    for name in ("video_preprocessor_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
        digests.add(digest_of(tmp_path))
    assert len(digests) == 3


def test_a_profile_names_the_model_of_its_run_file(tmp_path: Path) -> None:
    """Only with the processor that it is of."""
    write_llava(tmp_path / "model")
    run, digest = run_of(tmp_path / "model"), digest_of(tmp_path / "model")
    measured = inputs_of(Path("/before/model"), digest)
    profile = tiny(run_file()).model_copy(update={"inputs": measured})
    write_whole(run.dir.profile, profile.model_dump_json())
    assert profile_of(run).inputs == inputs_of(tmp_path / "model", digest)
    assert fingerprint(profile_of(run)) == fingerprint(profile)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(MismatchError, match="another processor"):
        profile_of(run)
