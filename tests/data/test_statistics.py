"""The numbers that the profile takes from the data."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import pack
from disttrain_cli.data.statistics import (
    describe_data,
    distribution,
    mean_and_max_work,
    sequence_work,
    text_loss_to_beat,
)
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS, encoded, interleaved, text


def test_totals(index: Index) -> None:
    packing = pack(Mixture(index, 0), 0)
    data = describe_data(packing)
    assert (data.samples, data.sequences, data.fingerprint) == (46, len(packing), index.fingerprint)
    assert data.text_tokens + data.image_tokens + 4 * data.targets == index.tokens.sum()
    assert data.images_per_sequence.mean == pytest.approx(data.images / len(packing))
    assert (
        data.images_per_sequence.p50 <= data.images_per_sequence.p99 <= data.images_per_sequence.max
    )


def test_work_of_sequences(index: Index) -> None:
    packing = pack(Mixture(index, 0), 0)
    work = sequence_work(packing)
    patches = packing.items["image"].grid.prod(axis=1)
    assert work["encoder"].sum(axis=0).tolist() == [len(patches), patches.sum(), (patches**2).sum()]
    assert work["llm"].sum(axis=0).tolist() == [
        len(packing),
        packing.tokens.sum(),
        packing.length_sq.sum(),
    ]
    targets = len(packing.items["target"].segment)
    assert work["generator"].sum(axis=0).tolist() == [targets, targets * 256, targets * 256**2]
    mean, largest = mean_and_max_work(packing)["llm"]
    assert (
        mean.tokens == pytest.approx(packing.tokens.mean())
        and largest.tokens == packing.tokens.max()
    )


def test_distribution_of_nothing() -> None:
    assert distribution(np.zeros(0, np.int64)).max == 0


def test_the_text_loss_to_beat_of_documents(own_run: Callable[..., Run]) -> None:
    run = own_run(
        {"a.tar": [interleaved("0", text("ab"), text("c")), interleaved("1", text("abc"))]}
    )
    index = build_index(run, INPUTS)
    assert text_loss_to_beat(run, index).basis == "tokens by their frequency"
    assert text_loss_to_beat(run, index).value == pytest.approx(
        np.log(4)
    )  # a, b, c and EOS, equally often


def talk(key: str, *turns: str) -> tuple[str, bytes]:
    """A conversation whose user begins."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(turns)
    ]
    return f"{key}.json", json.dumps({"messages": messages}).encode()


def test_the_text_loss_to_beat_of_conversations(own_run: Callable[..., Run]) -> None:
    """Of answers alone where they repeat: 20 of two, evenly. Where they are all different, or all
    alike, single tokens are counted, ends among them."""
    for answers, basis in (
        (["yes", "no"], "answers by their frequency"),
        ([str(number) for number in range(20)], "tokens by their frequency"),
        (["yes"], "tokens by their frequency"),
    ):
        talks = [
            talk(f"{number:02d}", f"Is {number} odd?", answers[number % len(answers)])
            for number in range(20)
        ]
        run = own_run({"a.tar": talks})
        index = build_index(run, INPUTS)
        found = text_loss_to_beat(run, index)
        assert found.basis == basis
        if len(answers) == 2:
            assert found.value == pytest.approx(20 * np.log(2) / index.label_tokens.sum())


def test_of_conversations_about_images_the_question_is_known(own_run: Callable[..., Run]) -> None:
    """Half of 20 answers each; the second answer is always the same."""
    talks = []
    for number in range(20):
        key, told = talk(f"{number:02d}", "Odd?", ("yes", "no")[number % 2], "Sure?", "Quite.")
        record = json.loads(told)
        picture = {"type": "image", "image": f"{number:02d}.jpg"}
        text = {"type": "text", "text": record["messages"][0]["content"]}
        record["messages"][0]["content"] = [picture, text]
        talks += [(f"{number:02d}.jpg", encoded(32, 32)), (key, json.dumps(record).encode())]
    run = own_run({"a.tar": talks})
    index = build_index(run, INPUTS)
    found = text_loss_to_beat(run, index)
    assert found.basis == "answers by their frequency after each question"
    assert found.value == pytest.approx(20 * np.log(2) / index.label_tokens.sum())
