"""A multimodal model as a graph of modules, each a list of pipeline layers over Hugging Face
classes.

Start at `layer.py` (what a layer is), then `graph.py` (which layers a model has). `division.py` and
`sharding.py` say what one rank of a TP group holds, `flops.py` counts model FLOPs, `operators.py`
the kernels that would run.
"""

# refuses a torch that it is not made for
from disttrain_cli.models import torch_versions as torch_versions
