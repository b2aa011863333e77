"""`model.modules.NAME.lora`: low-rank adapters of a module, under peft's names."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict

#: peft's name for every linear layer but an LLM's head.
ALL_LINEAR = "all-linear"
#: peft's own defaults.
DEFAULTS: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "modules_to_save": (),
    "lora_dropout": 0.0,
}
FIELDS = (*DEFAULTS, "target_modules")


class LoraSpec(Strict):
    """Low-rank adapters of a module (LoRA): W x + lora_alpha / r · B (A x).

    See Hu et al. 2021, arXiv 2106.09685. The adapters of such a module are trained, and its own
    weights never change.
    """

    folder: str | None = Field(
        None,
        description="Local folder of a peft adapter (adapter_config.json,"
        " adapter_model.safetensors), from which adapters start; r, lora_alpha, target_modules and"
        " use_rslora default to its values.",
    )
    r: int | None = Field(
        None, ge=1, le=65_536, description="Rank of the adapters; 8 by default, as in peft."
    )
    lora_alpha: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Scale of the adapters is lora_alpha / r; 8 by default, as in peft.",
    )
    target_modules: list[str] | str | None = Field(
        None,
        description="Linear layers with adapters, in peft's notation: suffixes of their names"
        " (q_proj), a regular expression of complete names, or all-linear: all except an LLM's"
        " head.",
    )
    use_rslora: bool | None = Field(
        None,
        description="Scale by lora_alpha / √r instead (Kalajdzievski 2023, arXiv 2312.03732);"
        " false by default.",
    )

    lora_dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Dropout of an adapter's input during training, the same in every layout; 0 by"
        " default, or the value of the adapter's folder.",
    )
    modules_to_save: list[str] | None = Field(
        None,
        description="Parts of the module that are trained completely in addition to adapters, by"
        " suffixes of their names as in peft: embed_tokens, lm_head; norm is every norm whose name"
        " ends with it.",
    )

    @model_validator(mode="after")
    def _somewhere(self) -> LoraSpec:
        if not self.target_modules and self.folder is None:
            raise ValueError(
                "set target_modules, such as [q_proj, v_proj] or all-linear, or the folder of an"
                " adapter"
            )
        return self
