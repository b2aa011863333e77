"""The data part of a profile: files, a named distribution, and data that leaves a module without
work."""

from pathlib import Path

import pytest

from disttrain_cli.errors import DataError
from disttrain_cli.models.graph import describe
from disttrain_cli.profiling import preprocess
from disttrain_cli.profiling.dataset import read_dataset
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import DataSpec, DistributionSpec
from tests.profiling.test_measure import MODULES, run_file


def with_distribution(folder: Path, **fields: float) -> Run:
    run = run_file(folder, folder, list(MODULES), processes=1)
    data = DataSpec(
        distribution=DistributionSpec(sequences=64, **fields),
        sequence_length=2048,
        max_image_pixels=4096,
    )
    return run.model_copy(update={"file": run.file.model_copy(update={"data": data})})


def test_a_distribution_stands_in_for_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "SECONDS", 0.01)
    run = with_distribution(tmp_path, images_per_sequence=4, generated_per_sequence=2)
    data = read_dataset(run, describe(run))
    assert (
        data.profile.sequences == 64
        and data.profile.images == 4 * 64
        and data.profile.targets == 2 * 64
    )
    assert data.mean["image_generator"].items == 2.0
    assert len(data.profile.sample.tokens) == 64 and len(data.drawn) == 256
    rates = data.preprocess
    assert rates.sequences_per_s_per_core == pytest.approx(rates.images_per_s_per_core / 6)
    assert "synthetic" in data.provenance["preprocess"]
    assert not list(tmp_path.glob("runs/**/*.parquet"))


@pytest.mark.parametrize(
    ("field", "module"),
    [("images_per_sequence", "image_encoder"), ("generated_per_sequence", "image_generator")],
)
def test_a_module_that_gets_no_work_is_named(tmp_path: Path, field: str, module: str) -> None:
    run = with_distribution(tmp_path, **{field: 0.0})
    with pytest.raises(DataError) as error:
        read_dataset(run, describe(run))
    assert module in error.value.what and f"data.distribution.{field}" in error.value.next_step
