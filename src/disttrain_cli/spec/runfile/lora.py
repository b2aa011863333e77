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
        description=(
            "Local folder of an adapter as peft writes it (adapter_config.json,"
            " adapter_model.safetensors), from which adapters start; it says r, lora_alpha,"
            " target_modules and use_rslora, so that these need not be given."
        ),
    )
    r: int | None = Field(
        None, ge=1, le=65_536, description="Rank of the adapters; 8 if not given, as in peft."
    )
    lora_alpha: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Adapters are scaled by lora_alpha / r; 8 if not given, as in peft.",
    )
    target_modules: list[str] | str | None = Field(
        None,
        description=(
            "Linear layers with adapters, as peft takes them: ends of their names (q_proj), a"
            " regular expression of whole names, or all-linear: all but an LLM's head."
        ),
    )
    use_rslora: bool | None = Field(
        None,
        description=(
            "Scale by lora_alpha / √r instead (Kalajdzievski 2023, arXiv 2312.03732); false if not"
            " given."
        ),
    )

    lora_dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "Share of what an adapter reads that is dropped while training, the same in every"
            " layout; 0 if not given, or as the adapter's folder says."
        ),
    )
    modules_to_save: list[str] | None = Field(
        None,
        description=(
            "Parts of the module that are trained whole beside adapters, by the ends of their names"
            " as in peft: embed_tokens, lm_head; norm is every norm whose name ends so."
        ),
    )

    @model_validator(mode="after")
    def _somewhere(self) -> LoraSpec:
        if not self.target_modules and self.folder is None:
            raise ValueError(
                "give target_modules, such as [q_proj, v_proj] or all-linear, or the folder of an"
                " adapter"
            )
        return self
