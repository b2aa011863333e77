"""Checked adapter configuration of a module."""

from __future__ import annotations

import re

from disttrain_cli.errors import SpecError
from disttrain_cli.models.lora import Lora
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.adapters import resolved
from disttrain_cli.spec.runfile.lora import ALL_LINEAR


def read_lora(run: Run, module: str) -> Lora | None:
    """Return a module's adapters as run file and folder define them; None without adapters.

    Raises:
        SpecError: the folder holds another kind of adapter, or the two disagree.
    """
    found = resolved(run, module)
    if found is None:
        return None
    fields, targets = found.fields, found.fields["target_modules"]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        try:
            re.compile(targets)
        except re.error as error:
            raise SpecError(
                f"model.modules.{module}.lora.target_modules is no regular expression",
                f"given: {targets}; {error}",
                "Give a list of names to name layers by the ends of their names.",
            ) from None
    return Lora(
        module,
        fields["r"],
        fields["lora_alpha"],
        targets if isinstance(targets, str) else tuple(targets),
        fields["use_rslora"],
        tuple(fields["modules_to_save"]),
        fields["lora_dropout"],
        found.folder,
        () if found.part is None else tuple(found.part.names.items()),
    )
