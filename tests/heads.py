"""Inputs of models with other encoders or generators."""

from disttrain_cli.spec.heads import Head, Item
from disttrain_cli.spec.inputs import ModelInputs


def with_heads(inputs: ModelInputs, item: Item, *heads: Head) -> ModelInputs:
    """The inputs with these heads of an item, in the place of those that they have."""
    others = [head for head in inputs.heads if head.item != item]
    return inputs.model_copy(update={"heads": [*others, *heads]})
