"""What trains, passes gradients on or stands still, of a model of which some modules are
trained."""

from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.layer import PipelineLayer, TensorSpec
from disttrain_cli.runtime.engine.gradients import GradientFlow, gradient_flow


def _layer(
    module: str,
    number: int,
    reads: str,
    writes: str,
    kind: str = "block",
    frozen: bool = False,
    owners: str | None = None,
) -> LayerInfo:
    return LayerInfo(
        name=f"{module}.{number}",
        module=module,
        kind=kind,
        reads=tuple(reads.split()),
        writes=tuple(TensorSpec(name, "sequence", "tokens", (4,)) for name in writes.split()),
        needs=(),
        loss=None,
        parameters=1,
        frozen=frozen,
        owners=frozenset((owners or ("projectors" if kind == "projector" else module)).split()),
    )


#: Two encoders side by side, an LLM that reads both, a generator whose first layer reads nothing
#: of it.
TABLE = [
    _layer("eye", 0, "", "image"),
    _layer("eye", 1, "image", "image_embeds", "projector"),
    _layer("ear", 0, "", "audio_embeds"),
    _layer("llm", 0, "image_embeds audio_embeds", "hidden"),
    _layer("llm", 1, "hidden", "context"),
    _layer("generator", 0, "", "latents", frozen=True),
    _layer("generator", 1, "context", "condition", "projector"),
    _layer("generator", 2, "latents", "sample"),
    _layer("generator", 3, "sample condition", ""),
]


def _flow(*trained: str) -> GradientFlow:
    return gradient_flow(TABLE, trained or None)


def test_everything_trains_but_what_never_does() -> None:
    flow = _flow()
    assert flow.trained == (True,) * 5 + (False,) + (True,) * 3
    assert flow.carrying[5] == {"image", "image_embeds", "audio_embeds", "hidden", "context"}
    assert "latents" not in flow.carrying[-1]


def test_gradients_follow_the_tensors_not_the_order_of_the_layers() -> None:
    flow = _flow("eye")
    assert flow.trained == (True, False, False, False, False, False, False, False, False)
    assert flow.passes == (False, True, False, True, True, False, True, False, True)
    assert flow.carrying[3] == {"image", "image_embeds"}  # nothing comes back to the other encoder


def test_projectors_are_trained_by_a_name_of_their_own() -> None:
    flow = _flow("projectors")
    assert [place for place, trained in enumerate(flow.trained) if trained] == [1, 6]
    assert flow.passes == (False, False, False, True, True, False, True, False, True)
    assert _flow("generator").trained == (False,) * 7 + (True, True)
    assert not any(_flow("generator").carrying[:8])


def test_a_layer_with_weights_of_two_names_trains_by_either() -> None:
    table = [
        _layer("eye", 0, "", "image"),
        _layer("eye", 1, "image", "image_embeds", "projector", owners="eye projectors"),
    ]
    assert (
        gradient_flow(table, ["eye"]).trained == gradient_flow(table, None).trained == (True, True)
    )
    assert gradient_flow(table, ["projectors"]).trained == (False, True)
    assert gradient_flow(table, ["llm"]).trained == (False, False)


def test_layers_are_told_and_their_weights_frozen() -> None:
    import torch

    made = [PipelineLayer() for _ in TABLE[:4]]
    for layer, info in zip(made, TABLE, strict=False):
        layer.module, layer.kind, layer.weight = (
            info.module,
            info.kind,
            torch.nn.Parameter(torch.zeros(1)),
        )
    _flow("eye").mark(made[1:], 1)
    assert [(layer.trained, layer.passes, layer.weight.requires_grad) for layer in made] == [
        (True, True, True),
        (False, True, False),
        (False, False, False),
        (False, True, False),
    ]
