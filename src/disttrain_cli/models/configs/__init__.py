"""Checked configurations of library classes from the run file's modules, one file per family.

transformers swallows misspelt fields and diffusers raises tracebacks; here every wrong field is
named. `models.architectures` maps each architecture to its reader.
"""

from disttrain_cli.models.configs.checks import ModuleConfig, refused
from disttrain_cli.models.configs.generators import known_fields

__all__ = ["ModuleConfig", "known_fields", "refused"]
