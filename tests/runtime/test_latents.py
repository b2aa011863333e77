"""Latents prepared beforehand: the same losses as with the VAE in the pipeline, whoever reads them;
how they are made, and what is refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.latents import described, open_latents
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.packing import pack
from disttrain_cli.errors import DataError, DisttrainError, MismatchError, SpecError
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.profiling.preprocess import measure_preprocessing
from disttrain_cli.runtime import latents as making
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints import folder as checkpoint_folder
from disttrain_cli.runtime.feeding import message_dtype, to_batch
from disttrain_cli.runtime.latents import Made, make_latents
from disttrain_cli.runtime.launching.starts import alone
from disttrain_cli.spec.index import TARGET
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.cases import first_fast, mostly_slow
from tests.data.dataset import damaged, encoded, image, interleaved, text, write_tar
from tests.data.serving.services import address, content, pulling, remote, serving
from tests.runtime.equivalence_worker import reference
from tests.runtime.factory import REFINER, plan_of, unit, write_run
from tests.runtime.layouts import train

FIRST, SECOND = "image_generator", "refiner"
VAE = REFINER["vae"] | {"shift_factor": 0.1}
OPTION: dict[str, Any] = {name: {"cached_latents": True} for name in (FIRST, SECOND)}
STEPS = 2
FIELDS = {"tokens", "layout", "context", "labels", "target", "target.1", "weights"}


def samples(first: int, count: int, broken: tuple[int, ...] = ()) -> list[Any]:
    """Samples that ask for an image each."""
    files = []
    for n in range(first, first + count):
        picture = encoded(40, 40, shade=23 * n)
        files += [
            interleaved(f"{n:02d}", text(f"draw number {n}"), image(f"{n:02d}.a.jpg", True)),
            (f"{n:02d}.a.jpg", damaged(picture) if n in broken else picture),
        ]
    return files


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two shards; an image of the second cannot be decoded."""
    write_tar(tmp_path / "data" / "interleaved" / "a.tar", samples(0, 14))
    write_tar(tmp_path / "data" / "interleaved" / "b.tar", samples(14, 10, broken=(17,)))
    return tmp_path / "data"


def changed(run: Run, modules: dict[str, Any], **sections: Any) -> Run:
    """A run in a folder beside it, over the same data."""
    file = yaml.safe_load(run.path.read_text())
    for name, fields in modules.items():
        file["model"]["modules"][name] |= fields
    for name, fields in sections.items():
        file[name] |= fields
    folder = run.folder.parent / f"run-{len(list(run.folder.parent.iterdir()))}"
    folder.mkdir()
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(file))
    return read_run(folder / "disttrain.yaml")


@pytest.fixture
def plain(tmp_path: Path, data: Path) -> Run:
    """Two generators, each of another size and with a VAE of its own, in the pipeline."""
    run = write_run(tmp_path / "runs" / "plain", data, modules=("llm", FIRST, SECOND))
    latent = {"in_channels": 4, "out_channels": 4, "sample_size": 8}
    file = yaml.safe_load(run.path.read_text())
    unet = file["model"]["modules"][FIRST]["config"] | latent
    file["data"] |= {"sources": [{"path": str(data / "interleaved")}], "max_bad_fraction": 0.2}
    file["data"] |= {"sequence_length": 64}
    run.path.write_text(yaml.safe_dump(file))
    vae = VAE | {"block_out_channels": [8, 8]}
    return changed(read_run(run.path), {FIRST: {"config": unet, "vae": vae}, SECOND: {"vae": VAE}})


@pytest.fixture
def cached(plain: Run) -> Run:
    """The same with the option; nothing is prepared yet."""
    return changed(plain, OPTION)


def layout_of(run: Run) -> Layout:
    modules = list(dict.fromkeys(info.module for info in layer_table(run)))
    return plan_of(run, [unit("all", modules, [len(layer_table(run))])], 1).plan


def fetched(run: Run, index: Index, fields: set[str] = FIELDS) -> Iterator[tuple[Any, Any]]:
    """The orders and prepared slots of two steps, which are more than all samples."""
    orders = Orders(run.file, layout_of(run), index)
    with Loader(run, orders, unit="all", replica=0, fields=fields) as loader:
        for step, slot in product(range(2), range(orders.layout.microbatches)):
            yield loader.order(step), loader.fetch(step, slot)


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )


@pytest.mark.slow
def test_losses_and_parameters_are_those_of_the_run_with_its_vaes(plain: Run, cached: Run) -> None:
    index, made = make_latents(cached, silent)
    assert build_index(plain, describe(plain)).fingerprint == index.fingerprint
    assert [one.image_bytes for one in made] == [4 * 8 * 8 * 8, 4 * 8 * 12 * 12]
    (history, weights, _), (found, without_vae, _) = (
        reference(run, STEPS) for run in (plain, cached)
    )
    close(found, history)
    assert set(weights) - set(without_vae) == {key for key in weights if ".vae_encoder/" in key}
    for key, value in without_vae.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-6, atol=1e-6)
    assert all(torch.tensor(history).isfinite().flatten()) and history[0] != history[1]


@pytest.mark.parametrize("precision", mostly_slow(["fp32", "bf16"], "fp32"))
def test_what_generators_read_is_what_their_vaes_would_leave(
    plain: Run, cached: Run, precision: str
) -> None:
    train = {"precision": precision, "zero_stage": 1}
    plain, cached = changed(plain, {}, train=train), changed(cached, {}, train=train)
    dtype = message_dtype(cached.file.train)
    index, made = make_latents(cached, silent)
    assert made[0].image_bytes == 8 * 8 * 8 * (2 if precision == "bf16" else 4)
    layers = {
        layer.name: layer
        for run in (plain, cached)
        for layer in build_layers(run, 0, len(layer_table(run)), dtype=dtype)
    }
    slots = zip(
        fetched(plain, build_index(plain, describe(plain))), fetched(cached, index), strict=True
    )
    compared = 0
    for both in slots:
        pixels, moments = (
            to_batch(arrays, order, torch.device("cpu"), dtype) for order, arrays in both
        )
        for name in (FIRST, SECOND):
            vae, start = layers[f"{name}.vae_encoder"], layers[f"{name}.in"]
            expected = vae({}, pixels)["latents"]
            keep = pixels.of("target").weights > 0
            found = start.canvas.clean({}, moments)
            assert found.dtype == expected.dtype == dtype
            tolerance = 1e-6 if precision == "fp32" else 2**-7
            torch.testing.assert_close(found[keep], expected[keep], rtol=tolerance, atol=tolerance)
            compared += int(keep.sum())
    assert compared > 10


@pytest.mark.slow
def test_samples_with_a_broken_image_are_left_out_as_without_the_option(
    plain: Run, cached: Run
) -> None:
    index, made = make_latents(cached, silent)
    assert [[one.key for one in of.broken] for of in made] == [["17"], ["17"]]
    before = build_index(plain, describe(plain))
    for fields in (FIELDS, {"labels"}, {"weights"}):
        skipped = 0
        for (_, one), (_, other) in zip(
            fetched(plain, before, fields), fetched(cached, index, fields), strict=True
        ):
            one, other = (
                {name: value for name, value in content(arrays).items() if "values" not in name}
                for arrays in (one, other)
            )
            assert one == other
            weights = other.get("target/weights")
            skipped += 0 if weights is None else (np.frombuffer(weights[2], "f4") == 0).sum()
        assert (skipped > 0) == (fields != {"labels"})


@pytest.mark.slow
def test_workers_send_the_same_bytes(cached: Run) -> None:
    for precision in ("fp32", "bf16"):
        run = changed(cached, {}, train={"precision": precision, "zero_stage": 1})
        index, _ = make_latents(run, silent)
        layout = layout_of(run)
        with serving(run, index, layout) as worker:
            pulled = pulling(run, address(worker))
            with remote(pulled, index, layout=layout, fields=FIELDS) as loader:
                for number, (_, own) in enumerate(fetched(run, index)):
                    there = content(loader.fetch(*divmod(number, layout.microbatches)))
                    assert there == content(own)
                    kinds = {kind for kind, *_ in there["target/values/1"]}
                    assert kinds <= {"<u2" if precision == "bf16" else "<f4"}
        for file in (run.dir.latents / SECOND).iterdir():
            file.unlink()
        with pytest.raises(DataError, match="no latents for refiner"), serving(run, index, layout):
            pass


def test_a_profile_decodes_only_images_that_training_decodes(plain: Run, cached: Run) -> None:
    one = changed(plain, {FIRST: OPTION[FIRST]})
    rates = []
    for run in (plain, one, cached):
        inputs = describe(run)
        packing = pack(Mixture(build_index(run, inputs), 0), 0)
        rates.append(measure_preprocessing(run, packing, 0.01).images_per_s_per_core)
    assert rates[0] > 0 and rates[1] > 0 and rates[2] == 0


class Interrupted(Exception):
    pass


def interrupted(monkeypatch: pytest.MonkeyPatch, run: Run, after: int) -> None:
    """Have the making of latents end after so many messages of its progress."""
    told = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal told
        told += what.startswith("encode")
        if told == after:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(making, "PIXELS", 2 * 24 * 24)
        with pytest.raises(Interrupted):
            make_latents(run, progress)


@pytest.mark.slow
def test_past_the_allowed_fraction_it_stops_whatever_earlier_calls_made(
    cached: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(data / "interleaved" / "0.tar", samples(60, 6, broken=(61, 62, 63)))
    strict = changed(cached, {}, data={"max_bad_fraction": 0.11})  # of 30 images: 3
    interrupted(monkeypatch, strict, 4)  # behind the first shard
    for _ in range(2):
        with pytest.raises(DataError, match="4 images or clips cannot be decoded") as caught:
            make_latents(strict, silent)
        assert "61: segments[1]" in caught.value.why and "17: segments[1]" in caught.value.why
        assert "data_check" in caught.value.next_step
    lenient = changed(cached, {}, data={"max_bad_fraction": 0.14})
    shutil.copytree(strict.dir.root, lenient.dir.root)
    index, made = make_latents(lenient, silent)
    assert [one.key for one in made[0].broken] == ["61", "62", "63", "17"]
    assert described(lenient, index)


def test_rows_of_broken_images_have_the_size_of_others(plain: Run) -> None:
    """Of three channels, seven pixels wide: no whole number of eight bytes."""
    latent = {
        "in_channels": 3,
        "out_channels": 3,
        "sample_size": 7,
        "block_out_channels": [16],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
    }
    file = yaml.safe_load(plain.path.read_text())
    module = file["model"]["modules"][FIRST]
    run = changed(
        plain,
        {
            FIRST: {
                "config": module["config"] | latent,
                "image_size": 14,
                "vae": module["vae"] | {"latent_channels": 3},
                "cached_latents": True,
            }
        },
        train={"precision": "bf16", "zero_stage": 1},
    )
    index, (made,) = make_latents(run, silent)
    assert made.image_bytes % 8 and [one.key for one in made.broken] == ["17"]
    assert described(run, index)
    assert sum(np.all(row == 0xFF) for row in rows_of(run, made)) == 1


def rows_of(run: Run, made: Made) -> Iterator[Any]:
    for path in (run.dir.latents / made.module).glob("*.bin"):
        yield from np.fromfile(path, np.uint8).reshape(-1, made.image_bytes)


def files_of(run: Run) -> dict[str, bytes]:
    return {
        str(path.relative_to(run.dir.latents)): path.read_bytes()
        for path in run.dir.latents.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_an_interrupted_call_goes_on_and_leaves_what_one_call_would(
    cached: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = changed(cached, {})
    index, _ = make_latents(whole, silent)
    for after in (3, 4, 9):
        interrupted(monkeypatch, cached, after)
        with pytest.raises(DataError, match="There are no latents"):
            described(cached, index)
    partial = next(cached.dir.latents.rglob("*.partial"))
    partial.write_bytes(partial.read_bytes() + b"half a row")
    encoded_images = []
    encoder = making._encoder

    def counted(*given: Any) -> Callable[..., Any]:
        encode = encoder(*given)

        def count(pixels: Any) -> Any:
            encoded_images.append(len(pixels))
            return encode(pixels)

        return count

    monkeypatch.setattr(making, "_encoder", counted)
    make_latents(cached, silent)
    assert 0 < sum(encoded_images) < 2 * 24
    one, other = files_of(cached), files_of(whole)
    assert one.keys() == other.keys() and len(one) == 2 * (2 + 1)
    for name, data in one.items():
        if name.endswith(".json"):
            assert data == other[name]
        else:  # convolutions over other numbers of images
            rows, expected = (
                np.frombuffer(side, "<u4" if "ff" * 4 in side.hex() else "<f4")
                for side in (data, other[name])
            )
            if rows.dtype == np.dtype("<f4"):
                np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
            else:
                assert (rows == 2**32 - 1).sum() == (expected == 2**32 - 1).sum() > 0
    assert described(cached, index).keys() == {FIRST, SECOND}


@pytest.mark.slow
def test_new_shards_are_added_and_the_others_stay(cached: Run, data: Path) -> None:
    make_latents(cached, silent)
    before = files_of(cached)
    index, made = make_latents(cached, silent)
    assert [one.encoded for one in made] == [0, 0] and files_of(cached) == before
    write_tar(data / "interleaved" / "aa.tar", samples(50, 3))
    grown = open_index(cached, describe(cached))
    with pytest.raises(MismatchError, match="different data") as caught:
        described(cached, grown)
    assert index.fingerprint in caught.value.why and "data_latents" in caught.value.next_step
    index, made = make_latents(cached, silent)
    assert [(one.images, one.encoded) for one in made] == [(27, 3), (27, 3)]
    after = files_of(cached)
    assert all(after[name] == before[name] for name in before if name.endswith(".bin"))
    assert len(after) == len(before) + 2 and described(cached, index)
    (data / "interleaved" / "b.tar").unlink()
    _, made = make_latents_anew(cached)
    assert [(one.images, one.encoded) for one in made] == [(17, 0), (17, 0)]
    assert len(files_of(cached)) == len(before)


def make_latents_anew(run: Run) -> tuple[Index, list[Made]]:
    """After shards went, with a new index."""
    build_index(run, describe(run))
    return make_latents(run, silent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "train", "word"),
    first_fast(
        [
            ({SECOND: {"vae": VAE | {"scaling_factor": 0.5}}}, {}, "configuration"),
            ({}, {"seed": 5}, "weights: latents drawn from seed"),
            ({}, {"precision": "bf16", "zero_stage": 1}, "precision: latents fp32, now bf16"),
            ({SECOND: {"image_size": 32}}, {}, "image_size: latents 24, now 32"),
        ]
    ),
)
def test_latents_of_another_run_are_refused_and_what_differs_is_named(
    cached: Run, modules: dict[str, Any], train: dict[str, Any], word: str
) -> None:
    make_latents(cached, silent)
    other = changed(cached, modules, train=train)
    shutil.copytree(cached.dir.root, other.dir.root)
    index = open_index(other, describe(other))
    with pytest.raises(MismatchError, match="a different run file") as caught:
        described(other, index)
    assert word in caught.value.why and "disttrain_cli.data_latents" in caught.value.next_step
    make_latents(other, silent)
    assert described(other, index)


@pytest.mark.slow
def test_weights_of_a_folder_are_told_apart(cached: Run) -> None:
    from diffusers import AutoencoderKL

    folder = cached.folder / "vae"
    AutoencoderKL(**VAE).save_pretrained(folder)
    run = changed(cached, {SECOND: {"vae_folder": str(folder), "vae": None}})
    index, _ = make_latents(run, silent)
    assert described(run, index)
    AutoencoderKL(**VAE).save_pretrained(folder)
    with pytest.raises(MismatchError) as caught:
        described(run, index)
    assert "weights" in caught.value.why and "configuration" not in caught.value.why


@pytest.mark.slow
def test_damaged_latents_are_named_and_made_again(cached: Run) -> None:
    index, _ = make_latents(cached, silent)
    whole, folder = files_of(cached), cached.dir.latents / FIRST
    file, other = sorted(folder.glob("*.bin"))

    def refused() -> str:
        with pytest.raises(DataError) as caught:
            described(cached, index)
        assert "disttrain_cli.data_latents" in caught.value.next_step
        return str(caught.value)

    file.write_bytes(file.read_bytes()[:-1])
    other.unlink()
    assert "bytes are expected" in refused()
    make_latents(cached, silent)
    assert files_of(cached).keys() == whole.keys() and described(cached, index)
    reader = open_latents(cached, index)[FIRST]
    contents = [file.read_bytes(), other.read_bytes()]
    for one, whole_content in zip((file, other), contents, strict=True):
        one.write_bytes(whole_content[:-1])  # after all were found whole
    with pytest.raises(DataError, match="Cannot read the latents"):
        reader.file(0, int(np.flatnonzero(index.kinds == TARGET)[0]))
    for one, whole_content in zip((file, other), contents, strict=True):
        one.write_bytes(whole_content)
    other.unlink()
    assert "there is no such file" in refused()
    described_there = json.loads((folder / "latents.json").read_text())
    described_there["files"].pop()
    (folder / "latents.json").write_text(json.dumps(described_there))
    assert "other images" in refused()
    (folder / "latents.json").write_text("{")
    assert "not valid" in refused() or "Cannot read" in refused()
    shutil.rmtree(cached.dir.latents)
    assert "There are no latents" in refused()


def test_a_run_without_the_option_and_one_that_trains_are_told(plain: Run, cached: Run) -> None:
    with pytest.raises(SpecError, match="No generator") as caught:
        make_latents(plain, silent)
    assert "cached_latents: true" in caught.value.next_step
    with alone(cached.dir), pytest.raises(DisttrainError, match="under way"):
        make_latents(cached, silent)


@pytest.mark.slow
def test_several_ranks_train_alike_with_and_without_the_option(
    plain: Run, cached: Run, tmp_path: Path
) -> None:
    bf16 = {"precision": "bf16", "zero_stage": 1}
    runs = {
        "plain": plain,
        "cached": cached,
        "plain bf16": changed(plain, {}, train=bf16),
        "cached bf16": changed(cached, {}, train=bf16),
    }
    cases = []
    for name, run in runs.items():
        if name.startswith("cached"):
            make_latents(run, silent)
        else:
            build_index(run, describe(run))
        counts = [info.module for info in layer_table(run)]
        llm, first, second = (counts.count(module) for module in ("llm", FIRST, SECOND))
        units = [
            unit("llm", ["llm"], [llm], 2),
            unit(FIRST, [FIRST], [first - 2, 2]),
            unit(SECOND, [SECOND], [second], tp=2),
        ]
        cases.append((name, run, plan_of(run, units, 1)))
    out = train(cases, STEPS, tmp_path)
    for precision, tolerance in (("", 1e-6), (" bf16", 0.01)):
        history, found = (
            json.loads((out / f"{name}{precision}" / "history.json").read_text())
            for name in ("plain", "cached")
        )
        close(found, history, tolerance)
        expected, weights = (
            checkpoint.read_tensors(
                checkpoint_folder.latest(out / f"{name}{precision}" / "checkpoints")
            )
            for name in ("plain", "cached")
        )
        for key, value in weights.items():
            if key.startswith("weight/"):
                torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance)
