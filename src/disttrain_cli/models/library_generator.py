"""A transformer of diffusers that is not taken apart: one layer from noisy latents to the loss.

In order: projector, whole. The class's own forward runs, with the arguments that its signature has
and its pipeline in diffusers passes (`configs.library_generators`). It is replicated over a TP
group, so that a unit of its own with TP 1 serves it best; recomputing it saves no memory at its
peak, as it is one layer. Not supplied: pictures to start from, second text encoders, guidance
beyond the scale that diffusers trains with.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.checks import MISTAKES, refused
from disttrain_cli.models.configs.generators import whole_model
from disttrain_cli.models.configs.library_generators import FAMILIES, Family, patch_in
from disttrain_cli.models.flux import GUIDANCE, packed, unpacked
from disttrain_cli.models.generator import (
    Canvas,
    Finish,
    Projector,
    Start,
    even_sigmas,
    filled,
)
from disttrain_cli.models.host import constant, to_device
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.processors import OwnAttention


class WeightsOnMeta(TorchFunctionMode):
    """Places what classes allocate for weights on the meta device, and nothing that they compute.

    Weights begin as one of these; tables of positions, which are no weights, as ranges or arrays.
    """

    ALLOCATED = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.ALLOCATED:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class Constants:
    """Tensors of a model that are neither trained nor saved, moved with its inputs.

    They cease to be buffers, as a layer has none (`building`).
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[tuple[nn.Module, str, Tensor]] = []
        for part in model.modules():
            for name in list(part._buffers):
                setattr(part, name, part._buffers.pop(name))
            self._tensors += [
                (part, name, value) for name, value in vars(part).items() if torch.is_tensor(value)
            ]
        self._device = torch.device("cpu")

    def move(self, device: torch.device) -> None:
        """Place them on the device of the coming forward."""
        if device != self._device:
            for part, name, value in self._tensors:
                setattr(part, name, to_device(value, device))
            self._device = device


class Whole(Start, Finish):
    """The model, from noisy latents to the image loss."""

    kind = "whole"

    def __init__(
        self, module: str, family: Family, model: Any, canvas: Canvas, weight: float
    ) -> None:
        Finish.__init__(self, module, canvas, weight, ("conditioning",))
        self.name, self.family, self.config = f"{module}.whole", family, dict(model.config)
        self.model: Any = copy.deepcopy(model)
        own = (*model.named_children(), *model.named_parameters(recurse=False))
        self.published = {f"model.{name}": name for name, _ in own}
        self.constants = Constants(self.model)
        takes = inspect.signature(type(model).forward).parameters.values()
        self.takes = {one.name for one in takes} - {
            one.name for one in takes if "mask" in one.name and one.default is None
        }

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        return Finish.compute(self, {**state, **Start.compute(self, state, batch)}, batch)

    def sigmas(self, steps: int) -> list[float] | None:
        return None if self.canvas.noise.dynamic is None else even_sigmas(steps)

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        family, patch = self.family, patch_in(self.family, self.config)
        noisy = noisy_NCHW.to(next(self.model.parameters()).dtype)
        conditioning_NKD = state["conditioning"].unflatten(0, (len(noisy), -1))
        grid = noisy.shape[2] // patch, noisy.shape[3] // patch
        named = self._named(conditioning_NKD, grid, times_N)
        if family.layout == "patches":
            latents: Any = packed(noisy, patch)
        elif family.layout == "image":
            latents = noisy
        else:
            latents = noisy.unsqueeze(2)
        if family.layout == "list":
            latents, named["cap_feats"] = list(latents), list(conditioning_NKD)
        named |= {"hidden_states": latents, "x": latents}
        self.constants.move(noisy.device)
        with OwnAttention():
            made = self.model(**{name: named[name] for name in self.takes & named.keys()})[0]
        if family.layout == "patches":
            made = unpacked(made, patch, grid)
        elif family.layout == "list":
            made = torch.stack(made)
        made = made.squeeze(2) if family.layout in ("video", "list") else made
        return {"prediction": -made if family.time == "clean" else made}

    def _named(
        self, conditioning_NKD: Tensor, grid: tuple[int, int], times_N: Tensor
    ) -> dict[str, Any]:
        """Return arguments that classes have, by name, but for the latents."""
        family, device, (count, context) = self.family, times_N.device, conditioning_NKD.shape[:2]
        sigma = times_N / self.canvas.noise.timesteps
        time = {
            "sigma": sigma,
            "clean": 1 - sigma,
            "timestep": times_N * self.config.get("timestep_scale", 1.0),
        }[family.time]
        if family.rounds_time:
            time = time.to(conditioning_NKD.dtype)
        named: dict[str, Any] = {
            "encoder_hidden_states": conditioning_NKD,
            "encoder_attention_mask": conditioning_NKD.new_ones((count, context), dtype=torch.bool),
            "timestep": time,
            "t": time,
            "return_dict": False,
        }
        if family.positions is not None:
            at = constant(family.positions, context, grid, device=device)
            named |= {"txt_ids": at[:context], "img_ids": at[context:]}
        if self.config.get("guidance_embeds"):
            named["guidance"] = filled(count, (GUIDANCE,), times_N.float()).flatten()
        return named

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        return state["prediction"].float()


def makers(
    architecture: str,
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of a transformer that runs whole.

    Raises:
        SpecError: diffusers rejects the configuration, or cannot compute with it.
    """
    family = FAMILIES[architecture]
    width = config[family.width]

    @cache
    def whole() -> Any:
        with torch.device("cpu"):
            return whole_model(module, architecture, config, without=WeightsOnMeta())

    def construct() -> Whole:
        return Whole(module, family, whole(), canvas, loss_weight)

    with torch.device("meta"):
        layer, noisy = construct(), torch.empty(1, *canvas.shape)
        state = {"conditioning": torch.empty(context_tokens, width)}
        try:
            made = layer.start(state, noisy, torch.empty(1))["prediction"]
        except (*MISTAKES, RuntimeError, AssertionError) as error:
            raise refused(module, family.model, error) from None
    assert made.shape == noisy.shape, (architecture, made.shape)
    return [
        LayerMaker(
            partial(Projector, module, llm_width, projector_hidden, width, context_tokens), None
        ),
        LayerMaker(construct, None),
    ]
