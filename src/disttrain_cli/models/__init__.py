"""Multimodal model as a graph of modules, each a list of pipeline layers over Hugging Face classes.

Start at `layer.py` (the pipeline layer), then `graph.py` (the layers of a model). `division.py` and
`sharding.py` define the shard of a tensor-parallel rank, `flops.py` counts model FLOPs,
`operators.py` lists the kernels that would run.
"""

# raises on an unsupported torch version
from disttrain_cli.models import torch_versions as torch_versions
