"""`cluster.kubernetes` and `cluster.skypilot`: where containers run the ranks, and what they
mount."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from disttrain_cli.spec.files import Strict

#: A DNS label as RFC 1035 has it, which names of JobSets must be: their pods' host names begin so.
DNS_LABEL = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
#: A DNS name as RFC 1123 has it, which Kubernetes takes for most other objects.
DNS_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
#: A container image, with its tag or digest.
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
#: A folder inside containers; Kubernetes takes no colon there.
FOLDER = r"^/[^:\x00-\x1f]+$"
LABEL_KEY = r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"
Labels = dict[Annotated[str, Field(pattern=LABEL_KEY)], Annotated[str, Field(pattern=LABEL_VALUE)]]


class KubernetesSpec(Strict):
    """What `disttrain train --emit jobset` asks Kubernetes for."""

    name: str | None = Field(
        None, pattern=DNS_LABEL, description="Name of the JobSet; the run's name if not given."
    )
    namespace: str | None = Field(None, pattern=DNS_NAME, description="Namespace of the JobSet.")
    image: str | None = Field(
        None,
        pattern=IMAGE,
        description="Image of all containers, built with the Dockerfile that --emit jobset writes.",
    )
    claim: str | None = Field(
        None,
        pattern=DNS_NAME,
        description=(
            "Persistent volume claim (ReadWriteMany) that holds the run file, runs/ and the data."
        ),
    )
    mount: str | None = Field(
        None,
        pattern=FOLDER,
        description=(
            "Folder at which the pods mount the claim; --emit must see it there, too, as it writes"
            " absolute paths."
        ),
    )
    queue: str | None = Field(
        None, pattern=LABEL_VALUE, description="Kueue's LocalQueue; without one, no label is set."
    )
    node_selector: Labels = Field(
        default_factory=dict, description="Labels of the nodes with GPUs."
    )
    cpu_node_selector: Labels = Field(
        default_factory=dict, description="Labels of the preprocessing nodes."
    )
    resources: dict[
        Annotated[str, Field(pattern=LABEL_KEY)], int | Annotated[str, Field(pattern=QUANTITY)]
    ] = Field(
        default_factory=dict,
        description=(
            "More resources of every pod with ranks, requested and limited, such as memory: 1500Gi"
            " or rdma/ib: 8; cpu takes the place of the cores that ranks are found to need."
        ),
    )
    grace_s: int = Field(
        300,
        ge=10,
        le=86_400,
        description=(
            "Seconds that pods get to end their step and to write a checkpoint when they are asked"
            " to end."
        ),
    )
    tls_secret: str | None = Field(
        None,
        pattern=DNS_NAME,
        description=(
            "Secret with ca.crt, tls.crt and tls.key, mounted at preprocess.tls_ca, tls_cert and"
            " tls_key."
        ),
    )
    token_secret: str | None = Field(
        None,
        pattern=DNS_NAME,
        description="Secret with the key token, mounted at preprocess.token_file.",
    )


class SkypilotSpec(Strict):
    """What `disttrain train --emit skypilot` asks SkyPilot for."""

    infra: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9*][A-Za-z0-9_.:/*-]*$",
        description="Where to run, as SkyPilot writes it: kubernetes, aws/us-east-1, slurm/NAME.",
    )
    accelerator: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="SkyPilot's name of the GPU, such as H100; its number is gpus_per_node.",
    )
    image: str | None = Field(
        None,
        pattern=IMAGE,
        description="Docker image, built with the Dockerfile that --emit skypilot writes.",
    )
    volume: str | None = Field(
        None,
        pattern=DNS_NAME,
        description=(
            "SkyPilot volume that holds the run file, runs/ and the data; none where all nodes see"
            " these anyway."
        ),
    )
    mount: str | None = Field(
        None,
        pattern=FOLDER,
        description="Folder at which it is mounted; --emit must see it there, too.",
    )
    use_spot: bool = Field(
        False, description="Ask for instances that may be taken away; the job then goes on anew."
    )
