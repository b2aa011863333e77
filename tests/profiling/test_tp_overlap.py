"""What overlapping messages save: the ring's closed form, and never less time than the kernels or
the messages take."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.costs.hardware import KernelWork, analytic_device, link_profile
from disttrain_cli.models.footprint import Begun, Message, Waited
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.timeline import Event
from disttrain_cli.profiling.assemble import Hidden
from disttrain_cli.profiling.footprints import probes_of
from disttrain_cli.profiling.measure import overlap_savings_on
from disttrain_cli.profiling.tp_overlap import duration_ms, on_device, overlap_savings, times_ms
from disttrain_cli.spec.layer_costs import HidingPass
from disttrain_cli.spec.profile import DeviceProfile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work
from tests.profiling.test_analytic import make_run

PASSES = set(get_args(HidingPass))
WIDE: dict[str, Any] = {
    "llm": {
        "kind": "llm",
        "architecture": "llama",
        "config": {
            "vocab_size": 264,
            "hidden_size": 4096,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 11008,
        },
    }
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("wide"), WIDE, length=4096)


def plain(kernels: float) -> KernelWork:
    return KernelWork(product_flops=kernels, kernels=1)


def by_flops(events: Sequence[Event]) -> float:
    """A device where a FLOP and a byte take a millisecond each."""
    return duration_ms(events, lambda work: work.product_flops, lambda message: message.bytes)


@given(st.integers(2, 16), st.integers(0, 50), st.integers(0, 50))
def test_a_ring_takes_a_product_and_the_longer_of_both_for_each_step(
    ranks: int, product: int, message: int
) -> None:
    gathering: list[Event] = []
    summing: list[Event] = [plain(product)]
    for step in range(ranks - 1):
        travelling = Begun(Message("pass", message), step)
        gathering += [travelling, plain(product), Waited(step)]
        summing += [travelling, plain(product), Waited(step)]
    gathering.append(plain(product))
    ideal = product + (ranks - 1) * max(product, message)
    assert by_flops(gathering) == by_flops(summing) == ideal


def test_messages_follow_each_other_and_nobody_waits_for_the_unneeded() -> None:
    first, second = Begun(Message("pass", 5), 0), Begun(Message("pass", 5), 1)
    assert by_flops([first, second, plain(3), Waited(1), plain(1)]) == 11
    assert by_flops([first, second, plain(3), Waited(0), plain(1)]) == 6
    assert by_flops([first, second, plain(3)]) == 3
    assert by_flops([first, Waited(0), plain(3), second, Waited(1)]) == 13


def device(run: Run) -> tuple[Any, ...]:
    known = analytic_device("A800", run.file.cluster, "bf16")
    return known, "bf16", link_profile(known, run.file.cluster).of(True)


@pytest.mark.slow
def test_overlapped_passes_take_as_long_as_kernels_and_messages_at_least(wide: Run) -> None:
    probes = probes_of(wide, "llm", [1, 2, 4])
    block = next(index for index in probes.layers if probes.table[index].kind == "block")
    for tp in (2, 4):
        waiting, kernels, messages, hides = (
            times_ms(
                wide, probes, block, overlap, partial(duration_ms, kernels=a, messages=b), tp=tp
            )
            for overlap, a, b in (
                (False, kernel_ms, sent_ms),
                (True, kernel_ms, nothing_ms),
                (True, nothing_ms, sent_ms),
                (True, kernel_ms, sent_ms),
            )
        )
        assert hides.keys() == PASSES
        for name in PASSES:
            for slow, work, sent, fast in zip(
                waiting[name], kernels[name], messages[name], hides[name], strict=True
            ):
                assert max(work, sent) <= fast < min(slow, work + sent), name


def kernel_ms(work: KernelWork) -> float:
    return (work.product_flops + work.attention_flops) / 2e11 + work.moved_bytes / 1.6e9


def nothing_ms(event: object) -> float:
    return 0.0


def sent_ms(message: Message) -> float:
    return 0.01 + message.bytes / 1.6e8


@pytest.mark.slow
def test_what_is_hidden_is_exact_for_whole_sequences(wide: Run) -> None:
    for tp, kinds in overlap_savings(wide, "llm", [1, 2, 4], *device(wide)).items():
        assert kinds.keys() == {"block"}
        assert kinds["block"].keys() == PASSES
        probes = probes_of(wide, "llm", [tp])
        five = replace(
            probes,
            batches=[probe_batch(probes.inputs, device="meta", documents=[[4096]] * 5)],
            works=[Work(5)],
        )
        block = next(index for index in probes.layers if probes.table[index].kind == "block")
        duration = on_device(*device(wide), tp=tp)
        slow, fast = (times_ms(wide, five, block, on, duration, tp=tp) for on in (False, True))
        for name, polynomial in kinds["block"].items():
            assert polynomial(Work(5)) == pytest.approx(slow[name][0] - fast[name][0], rel=1e-6)
            assert polynomial(Work(5)) > 0


def test_measured_profiles_hide_on_known_devices_only(wide: Run) -> None:
    _, _, links = device(wide)

    def on(name: str, kind: str) -> dict[int, dict[str, Hidden]]:
        described = DeviceProfile(name=name, kind=kind, count=8, memory_gib=80, peak_tflops=312)
        return overlap_savings_on(described, "bf16", wide, "llm", [1, 2], links)

    known = on("NVIDIA A800-SXM4-80GB", "cuda")
    assert known == overlap_savings(wide, "llm", [1, 2], *device(wide)) and known[2]["block"]
    assert on("Some other GPU", "cuda") == on("A800", "cpu") == {}
