"""Number of cores for a rank of an emitted job."""

from __future__ import annotations

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run


def cpus_per_rank(run: Run, serving: bool) -> int:
    """Return the cores of a rank: its device's share of the node's, or its busy threads.

    The share applies where the node's cores are known. Busy threads are those of its steps, of its
    checkpoints, and every thread that decodes, or receives what other nodes have decoded; with a
    GPU also the thread that runs the backward, and NCCL's.

    Raises:
        SpecError: the share is smaller than the number of busy threads.
    """
    cluster, spec = run.file.cluster, run.file.preprocess
    busy = (2 if cluster.device == "cpu" else 4) + (
        1 if serving or spec.addresses else spec.workers
    )
    if cluster.node_cores is None:
        return busy
    share = cluster.node_cores // cluster.gpus_per_node
    if share < busy:
        raise SpecError(
            f"A rank keeps {busy} cores busy, and its share of a node is {share}",
            f"cluster.node_cores: {cluster.node_cores}, cluster.gpus_per_node:"
            f" {cluster.gpus_per_node}, preprocess.workers: {spec.workers}",
            (
                f"Set preprocess.workers: {share - busy + spec.workers}."
                if share - busy + spec.workers > 0
                else (
                    "Let other nodes prepare the data (cluster.cpu_nodes), or leave"
                    " cluster.node_cores out."
                )
            ),
        )
    return share
