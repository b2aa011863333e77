"""What slots keep and layers hold, at the worst work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.costs.activations import activation_terms, working_terms, worst_mix
from disttrain_cli.costs.freezing import backwards
from disttrain_cli.data.ordering.levelling import level
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.work import Work
from tests.planning import synthetic


@pytest.mark.parametrize(
    ("trained", "checkpointing", "times"), [(None, False, 0), (None, True, 1), (["llm"], True, 1)]
)
def test_inputs_of_a_slot_stay_where_layers_compute_again(
    trained: list[str] | None, checkpointing: bool, times: int
) -> None:
    """Pixels, which the encoder's first layer reads, are held by all that compute again."""
    profile = synthetic.tiny(synthetic.run_file())
    encoder = profile.modules["image_encoder"]
    embed = encoder.costs["embed"]
    reading = embed.model_copy(
        update={
            "tp": {
                tp: shard.model_copy(update={"batch_bytes": Polynomial(per_token=700.0)})
                for tp, shard in embed.tp.items()
            }
        }
    )
    known = profile.model_copy(
        update={
            "modules": profile.modules
            | {
                "image_encoder": encoder.model_copy(
                    update={"costs": encoder.costs | {"embed": reading}}
                )
            }
        }
    )
    before, after = (
        activation_terms(given, ["image_encoder"], trained, tp=1, recompute=checkpointing)[1].sum()
        for given in (profile, known)
    )
    assert after - before == pytest.approx(times * 700 * encoder.max_work_per_sequence.tokens)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 8), st.integers(1, 24))
def test_a_replica_has_whole_images_of_one_size(mean: int, more: int, slot: int, dp: int) -> None:
    """What levelling gives the fullest replica of a slot with one sequence above the mean."""
    profile = synthetic.tiny(synthetic.run_file())
    generator = profile.modules["image_generator"]
    known = {
        "work_per_sequence": Work(mean, 64 * mean, 64**2 * mean),
        "max_work_per_sequence": Work(mean + more, 64 * (mean + more), 64**2 * (mean + more)),
    }
    modules = profile.modules | {"image_generator": generator.model_copy(update=known)}
    profile = profile.model_copy(update={"modules": modules})
    shares = worst_mix(profile, ["image_generator"], slot, np.array([float(dp)]))
    items = float(
        sum(share[0] * n for share, n in zip(shares, (mean + more, mean, 1), strict=True))
    )
    fullest = max(map(len, level(np.full(mean * slot + more, 64), dp)))
    assert items == pytest.approx(fullest)


def test_one_replica_has_the_whole_slot() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    worst, mean, _ = worst_mix(profile, ["image_generator"], 4, np.array([1.0]))
    assert (worst[0], mean[0]) == (1.0, 3.0)
    assert Work(9, 1, 1).scaled(float(worst[0])) == Work(9, 1, 1)


def test_symmetric_memory_is_there_whatever_layer_runs() -> None:
    """As much as the layer with the most needs, and only where messages overlap with GEMMs."""
    profile = synthetic.tiny(synthetic.run_file())
    plain = working_terms(profile, ["llm"], tp=1)
    llm = profile.modules["llm"]
    for kind, per_token in (("block", 3.0), ("head", 1.0)):
        shard = llm.costs[kind].tp["1"]
        llm.costs[kind].tp["1"] = shard.model_copy(
            update={"symmetric_bytes": Polynomial(base=7.0, per_token=per_token)}
        )
    assert working_terms(profile, ["llm"], tp=1) == pytest.approx(plain)
    more = working_terms(profile, ["llm"], tp=1, overlap=True) - plain
    mean = llm.work_per_sequence
    expected = [7.0, 3.0 * llm.max_work_per_sequence.tokens, 3.0 * mean.tokens]
    expected.append(3.0 * mean.tokens / mean.items if mean.items else 0.0)
    assert more == pytest.approx(np.tile(np.array(expected)[:, None], len(llm.layers)))


def test_a_frozen_layer_without_a_backward_holds_what_its_forward_does() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    of = profile.modules["image_encoder"]

    def known(still: Polynomial | None) -> Profile:
        costs = {
            kind: cost.model_copy(
                update={
                    "tp": {
                        tp: shard.model_copy(update={"still_bytes": still})
                        for tp, shard in cost.tp.items()
                    }
                }
            )
            for kind, cost in of.costs.items()
        }
        module = of.model_copy(update={"costs": costs})
        return profile.model_copy(update={"modules": profile.modules | {"image_encoder": module}})

    still = Polynomial(per_item=1e9)
    for trained in (["llm"], ["image_encoder", "llm"]):
        terms, older, plain = (
            working_terms(one, ["image_encoder"], trained, tp=1)
            for one in (known(still), known(None), profile)
        )
        assert (older == plain).all()
        still_layers = [does == "still" for does in backwards(profile, trained)["image_encoder"]]
        assert any(still_layers) == ("image_encoder" not in trained)
        assert (terms[1, still_layers] == 1e9 * of.max_work_per_sequence.items).all()
        assert (np.delete(terms, still_layers, 1) == np.delete(plain, still_layers, 1)).all()
