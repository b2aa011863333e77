"""From the run file's modules to checked configurations of transformers and diffusers classes: one
file per family.

transformers swallows misspelt fields and diffusers raises tracebacks; here every wrong field is
named. Which function reads which architecture, `models.architectures` says.
"""

from disttrain_cli.models.configs.checks import ModuleConfig, refused
from disttrain_cli.models.configs.generators import known_fields, latent_side

__all__ = ["ModuleConfig", "known_fields", "latent_side", "refused"]
