"""From measurements to a module's costs: synthetic series whose truth is known."""

from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.costs.links import all_gather_s, all_reduce_s
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.profiling.assemble import (
    NOTHING,
    frozen_projection,
    message_ms,
    sent_bytes,
)
from disttrain_cli.profiling.fitting import fit
from disttrain_cli.profiling.footprints import Messages
from disttrain_cli.spec.layer_costs import Polynomial, combine
from disttrain_cli.spec.work import Work
from tests.profiles import links
from tests.profiling.test_analytic import MODULES, make_run


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_messages_take_what_the_links_say(tp: int) -> None:
    link, work = links(), Work(items=3, tokens=500)
    size = Polynomial(per_item=1e5, per_token=1e3)
    sent = Messages(
        {"all_reduce": 2, "all_gather": 1},
        {"all_reduce": size, "all_gather": Polynomial(per_item=3e5)},
    )
    expected_s = 2 * all_reduce_s(link, size(work) / 2, tp) + all_gather_s(link, 9e5, tp)
    assert message_ms(link, sent, tp=tp)(work) == pytest.approx(1e3 * expected_s)
    assert sent_bytes(sent, tp=tp)(work) == pytest.approx((2 * size(work) + 9e5) * (tp - 1) / tp)


def test_a_layer_that_is_whole_on_every_rank_sends_nothing() -> None:
    assert message_ms(links(), Messages(), tp=4) == NOTHING


def test_polynomials_add_up() -> None:
    left, right = Polynomial(base=1, per_item=2), Polynomial(per_item=3, per_length_sq=5)
    assert combine((2.0, left), (1.0, right)) == Polynomial(base=2, per_item=7, per_length_sq=5)
    assert combine() == NOTHING


def test_fits_have_no_terms_that_are_rounding_errors() -> None:
    works = [Work(n, 100 * n + n % 3, 7 * n * n) for n in range(1, 12)]
    found = fit(works, np.array([5e6 * work.items for work in works]))
    assert found.per_item == pytest.approx(5e6)
    assert found.base == found.per_token == found.per_length_sq == 0.0


@pytest.mark.parametrize(
    ("targets", "frozen"),
    [(None, False), ("all-linear", False), (["o_proj"], False), (["q_proj", "v_proj"], True)],
)
def test_what_attention_leaves_is_read_by_a_trained_projection_or_not(
    tmp_path: Path, targets: list[str] | str | None, frozen: bool
) -> None:
    lora = {"lora": {"r": 2, "target_modules": targets}} if targets else {}
    run = make_run(tmp_path, {"llm": MODULES["llm"] | lora})
    layers = build_layers(run, 0, len(layer_table(run)))
    assert {layer.kind: frozen_projection(layer) for layer in layers} == {
        "embed": False,
        "block": frozen,
        "head": False,
    }
