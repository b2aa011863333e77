"""Parts of synthetic profiles that the tests of several rooms share."""

from disttrain_cli.spec.layer_costs import HidingPass, LayerCost, LayerShard, Polynomial
from disttrain_cli.spec.profile import (
    DataProfile,
    Distribution,
    LinkProfile,
    LinkTimes,
    Profile,
    SizeSample,
)


def scaled(polynomial: Polynomial, factor: float) -> Polynomial:
    return Polynomial(**{name: factor * value for name, value in polynomial.model_dump().items()})


def hidden_ms(forward_ms: Polynomial, share: float) -> dict[HidingPass, Polynomial]:
    """What is hidden where that is a share of each pass, and less of a backward without its
    weights' part."""
    times: dict[HidingPass, float] = {
        "forward": 1.0,
        "backward": 2.0,
        "backward_input": 1.0,
        "recomputing": 3.0,
        "split": 1.5,
    }
    return {hiding: scaled(forward_ms, share * factor) for hiding, factor in times.items()}


def hiding(profile: Profile, share: float) -> Profile:
    """The profile with so much hidden of every layer that a TP group divides."""
    modules = {}
    for name, module in profile.modules.items():
        costs = {
            kind: cost.model_copy(
                update={
                    "tp": {
                        tp: shard.model_copy(
                            update={"hidden_ms": hidden_ms(shard.forward_ms, share)}
                        )
                        if int(tp) > 1
                        else shard
                        for tp, shard in cost.tp.items()
                    }
                }
            )
            for kind, cost in module.costs.items()
        }
        modules[name] = module.model_copy(update={"costs": costs})
    return profile.model_copy(update={"modules": modules})


def cost(
    forward_ms: Polynomial,
    parameters: int = 1,
    activation_bytes: Polynomial | None = None,
    flops: Polynomial | None = None,
    tps: tuple[int, ...] = (1,),
    tp_efficiency: float = 1.0,
    hidden: float = 0.0,
) -> LayerCost:
    """A layer whose backward takes twice its forward, half of it for the inputs' gradients.

    A TP group of t shares work evenly, `tp_efficiency` times as well with every doubling; a frozen
    layer keeps half of the activations. Where a group's messages overlap, each pass takes `hidden`
    of its time less, and as large a part of the activations is held beside.
    """
    kept, counted = activation_bytes or Polynomial(), flops or Polynomial()

    def shard(tp: int) -> LayerShard:
        share = 1.0 / (tp * tp_efficiency ** (tp.bit_length() - 1))
        forward = Polynomial(
            **{
                name: value if name == "base" else share * value
                for name, value in forward_ms.model_dump().items()
            }
        )
        return LayerShard(
            parameters=parameters // tp,
            forward_ms=forward,
            backward_ms=scaled(forward, 2),
            backward_input_ms=forward,
            weight_ms=scaled(forward, 0.8),
            activation_bytes=scaled(kept, 1 / tp),
            frozen_activation_bytes=scaled(kept, 0.5 / tp),
            input_bytes=scaled(kept, 0.1 / tp),
            transient_bytes=scaled(kept, 0.4 / tp),
            deferred_bytes=scaled(kept, 0.9 / tp),
            split_transient_bytes=scaled(kept, 0.95 / tp),
            hidden_ms=hidden_ms(forward, hidden) if hidden and tp > 1 else {},
            overlapping_bytes=scaled(kept, abs(hidden) if tp > 1 else 0.0),
            fit_error_pct=2.0,
        )

    return LayerCost(
        parameters=parameters,
        tp={str(tp): shard(tp) for tp in tps},
        forward_flops=counted,
        backward_flops=scaled(counted, 2),
        backward_input_flops=counted,
        weight_flops=scaled(counted, 0.8),
    )


def links(
    p2p_gbps: float = 10.0,
    p2p_us: float = 50.0,
    reduce_gbps: float = 5.0,
    reduce_us: float = 100.0,
    between_nodes: float | None = None,
) -> LinkProfile:
    """Links with one bandwidth for all collectives; `between_nodes` times as fast from node to
    node."""

    def times(factor: float) -> dict[str, float]:
        names = ("all_reduce", "all_gather", "reduce_scatter")
        return {
            "p2p_gbps": factor * p2p_gbps,
            "p2p_us": p2p_us,
            **{f"{name}_gbps": factor * reduce_gbps for name in names},
            **{f"{name}_us": reduce_us for name in names},
        }

    return LinkProfile(
        **times(1.0), inter_node=LinkTimes(**times(between_nodes)) if between_nodes else None
    )


def data(
    images: int = 3,
    tokens: int = 230,
    targets: int = 1,
    sequences: int = 16,
    patches: int = 40,
    length_sq: int = 20_000,
) -> DataProfile:
    """A dataset of a few hundred sequences; its sample spreads the counts from nothing to twice the
    mean."""
    spread = [
        round(2 * count * place / (sequences - 1))
        for place in range(sequences)
        for count in (images,)
    ]
    sample = SizeSample(
        tokens=[tokens] * sequences,
        length_sq=[length_sq] * sequences,
        images=[[patches] * count for count in spread],
        targets=[round(2 * targets * place / (sequences - 1)) for place in range(sequences)],
    )
    counts = Distribution(mean=images, p50=images, p95=2 * images, p99=2 * images, max=2 * images)
    return DataProfile(
        samples=1000,
        sequences=500,
        fingerprint="d" * 16,
        text_tokens=1,
        image_tokens=1,
        images=500 * images,
        targets=500 * targets,
        fill_fraction=0.9,
        images_per_sequence=counts,
        sample=sample,
    )
