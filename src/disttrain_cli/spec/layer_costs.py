"""Costs of a layer by module kind and TP size: times, memory, messages and FLOPs."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.work import Work


class Polynomial(Strict):
    """Amount depending on work: base and terms per item, per token and per squared length.

    It is base + per_item·items + per_token·tokens + per_length_sq·Σ length².
    """

    base: float = 0.0
    per_item: float = 0.0
    per_token: float = 0.0
    per_length_sq: float = 0.0

    def __call__(self, work: Work) -> float:
        return (
            self.base
            + self.per_item * work.items
            + self.per_token * work.tokens
            + self.per_length_sq * work.sum_length_sq
        )


def combine(*terms: tuple[float, Polynomial]) -> Polynomial:
    """Return Σ factor · polynomial."""
    base = per_item = per_token = per_length_sq = 0.0
    for factor, term in terms:
        base += factor * term.base
        per_item += factor * term.per_item
        per_token += factor * term.per_token
        per_length_sq += factor * term.per_length_sq
    return Polynomial(
        base=base, per_item=per_item, per_token=per_token, per_length_sq=per_length_sq
    )


Pass = Literal["forward", "backward", "backward_input", "recomputing", "recomputing_overlapped"]
#: Passes in which a TP group's messages may overlap with GEMMs; "split": a backward with deferred
#: weight gradients.
HidingPass = Literal["forward", "backward", "backward_input", "recomputing", "split"]


class LayerShard(Strict):
    """One rank's shard of a layer at one TP size; times include the TP group's messages.

    Without work all costs are 0.
    """

    parameters: int = Field(description="Number of parameters on one rank of the TP group.")
    trained_parameters: int | None = Field(
        None,
        description="Number of these that are trained if the layer is, namely its adapters; None:"
        " all, as the module has no lora.",
    )
    forward_ms: Polynomial
    backward_ms: Polynomial = Field(
        description="Backward pass with gradients of weights and inputs."
    )
    backward_input_ms: Polynomial = Field(
        description="Backward pass with gradients of inputs only, for frozen weights."
    )
    weight_ms: Polynomial = Field(
        default_factory=Polynomial,
        description="Part of `backward_ms` for gradients of linear and convolution weights, which"
        " may be deferred (`weight_delay` of a plan).",
    )
    activation_bytes: Polynomial = Field(
        description="Activation bytes kept from forward to backward."
    )
    frozen_activation_bytes: Polynomial = Field(
        description="Activation bytes kept if the weights are frozen."
    )
    input_bytes: Polynomial = Field(
        description="Bytes of the layer's input, the only activations kept under activation"
        " checkpointing."
    )
    batch_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description="Bytes of a slot's inputs that the layer reads (pixels, sound, token ids),"
        " which stay allocated under recomputation; otherwise they are part of the activation"
        " bytes.",
    )
    transient_bytes: Polynomial = Field(
        default_factory=Polynomial, description="Peak of further bytes that a pass holds at a time."
    )
    still_bytes: Polynomial | None = Field(
        None,
        description="Peak bytes of a forward without a backward, as for a frozen layer with no"
        " trained layer before it. None, in older profiles: `transient_bytes`.",
    )
    deferred_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description="Bytes kept from the backward on for deferred weight gradients.",
    )
    split_transient_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description="Peak of further bytes held between the split backward and the deferred weight"
        " gradients.",
    )
    recomputing_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description="Additional bytes under recomputation: a TP group's gathered rows, which are"
        " otherwise dropped.",
    )
    recomputing_ms: Polynomial = Field(
        default_factory=Polynomial,
        description="Additional time of a backward with recomputation, beyond forward and"
        " backward: below zero, as a TP group then does not gather rows twice.",
    )
    sent_bytes: dict[Pass, Polynomial] = Field(
        default_factory=dict,
        description="Bytes of the TP group's messages over the link of one rank, by pass;"
        " 'recomputing' is a backward with recomputation, 'recomputing_overlapped' the same with"
        " messages overlapped with GEMMs, which gathers rows twice.",
    )
    hidden_ms: dict[HidingPass, Polynomial] = Field(
        default_factory=dict,
        description="Time saved in a pass if the TP group's messages are overlapped with GEMMs"
        " (`tp_overlap` of a plan): hidden messages minus the cost of chunked GEMMs; 'recomputing'"
        " is a backward with recomputation, 'split' one with deferred weight gradients.",
    )
    overlapping_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description="Peak of further bytes held with overlapped messages.",
    )
    symmetric_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description="Symmetric memory that the TP group needs for overlapped messages on CUDA; the"
        " group permanently allocates as much as its largest layer needs.",
    )
    fit_error_pct: float = Field(
        description="Mean absolute error of forward plus backward on held-out sizes."
    )
    frozen_fit_error_pct: float = Field(
        0.0, description="The same error with gradients of inputs only."
    )

    @property
    def trainable(self) -> int:
        """Parameters of one rank that are trained if the layer is."""
        return self.parameters if self.trained_parameters is None else self.trained_parameters


class Heads(NamedTuple):
    """Heads of an attention, which ranks that share its tokens may share instead."""

    query: int
    key: int  # of keys, and of values
    width: int


class Routed(NamedTuple):
    """Measured routing of one modality's rows in the layers of a kind."""

    item: str  # modality, or "text"
    share: float  # of the data's rows
    # variance of an expert's rows in a sequence over that of independent rows
    dispersion: float
    # by layer in order, each expert's share of the chosen, in `ROUTED` parts
    layers: tuple[str, ...]


#: Parts in which shares of experts are stored, as whole numbers between spaces.
ROUTED = 100_000


class Experts(NamedTuple):
    """Experts of a layer, which ranks of an EP group may divide."""

    total: int
    chosen: int  # per token
    width: int  # numbers of a row
    parameters: int  # of all of them
    trained: int  # of these, that are trained if the layer is
    # bytes per row that arrives at an expert: saved if the layer is trained, or frozen, and the
    # peak of further ones in a pass
    kept_bytes: float = 0.0
    frozen_kept_bytes: float = 0.0
    working_bytes: float = 0.0
    routed: tuple[Routed, ...] = ()  # by modality; empty if not measured
    # bytes per such row held for gradients of weights that are computed later
    deferred_bytes: float = 0.0


class LayerCost(Strict):
    """Costs of one kind of layer of a module."""

    parameters: int = Field(description="Number of parameters of the whole layer.")
    tp: dict[str, LayerShard] = Field(description="Shards by TP size.")
    forward_flops: Polynomial = Field(
        description="FLOPs of the whole layer, counted from its operators."
    )
    backward_flops: Polynomial
    backward_input_flops: Polynomial = Field(
        description="FLOPs of the backward with gradients of inputs only."
    )
    weight_flops: Polynomial = Field(
        default_factory=Polynomial, description="Part of `backward_flops` that may be deferred."
    )
    heads: Heads | None = Field(
        None,
        description="For an attention whose rows may be sharded over ranks (CP): number of query"
        " heads, of key and value heads, and their width.",
    )
    experts: Experts | None = Field(
        None,
        description="For a mixture whose experts may be divided over ranks (EP): number of"
        " experts, of those that a token chooses, width of a row, number of parameters of all"
        " experts, and of those that are trained if the layer is; bytes per row at an expert,"
        " saved if the layer is trained, if it is frozen, and the peak of further ones; measured"
        " routing by modality, share of the rows, dispersion, and experts' shares by layer;"
        " bytes per row held for gradients of weights that are computed later.",
    )
    fused_heads: bool = Field(
        False,
        description="Queries, keys and values are views of one tensor: without CP a rank keeps all"
        " of it for the values, with CP only the values.",
    )
    frozen_projection: bool = Field(
        False,
        description="The projection after that attention is never trained and has no adapter: its"
        " input is not kept.",
    )
    gathered_bytes: Polynomial = Field(
        default_factory=Polynomial,
        description=("Bytes of encoder rows that the ranks of a CP group gather for the layer."),
    )
