"""`cluster.kubernetes` and `cluster.skypilot`: location and mounts of the ranks' containers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.forms import Form

#: DNS label of RFC 1035, required for JobSet names: their pods' host names begin with it.
DNS_LABEL = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
DnsLabel = Annotated[
    str, Form(DNS_LABEL, "at most 63 of a-z, 0-9 and -, a letter first and no - last")
]
#: DNS name of RFC 1123, which Kubernetes accepts for most other objects.
DnsName = Annotated[
    str,
    Form(
        r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        "at most 253 of a-z, 0-9, . and -, a letter or digit first and last",
    ),
]
Image = Annotated[
    str, Form(r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", "REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST")
]
#: Kubernetes allows no colon there.
Folder = Annotated[
    str, Form(r"^/[^:\x00-\x1f]+$", "an absolute path inside the containers, without a colon")
]
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_LABEL_WORDS = "at most 63 letters, digits, . _ and -, a letter or digit first and last"
LabelKey = Annotated[
    str, Form(rf"^([a-z0-9.-]{{1,253}}/)?{_LABEL}", f"[domain/]name; a name: {_LABEL_WORDS}")
]
LabelValue = Annotated[str, Form(f"^{_LABEL}", _LABEL_WORDS)]
Quantity = Annotated[
    str,
    Form(
        r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$",
        "a quantity of Kubernetes, such as 8 or 1500Gi",
    ),
]
Labels = dict[LabelKey, LabelValue]


class KubernetesSpec(Strict):
    """Settings of `disttrain train --emit jobset` for Kubernetes."""

    name: DnsLabel | None = Field(
        None, description="Name of the JobSet; the run's name if not given."
    )
    namespace: DnsName | None = Field(None, description="Namespace of the JobSet.")
    image: Image | None = Field(
        None,
        description="Image of all containers, built with the Dockerfile that --emit jobset writes.",
    )
    claim: DnsName | None = Field(
        None,
        description=(
            "Persistent volume claim (ReadWriteMany) that holds the run file, runs/ and the data."
        ),
    )
    mount: Folder | None = Field(
        None,
        description=(
            "Folder at which the pods mount the claim; --emit must see it there, too, as it writes"
            " absolute paths."
        ),
    )
    queue: LabelValue | None = Field(
        None, description="Kueue's LocalQueue; without one, no label is set."
    )
    node_selector: Labels = Field(
        default_factory=dict, description="Labels of the nodes with GPUs."
    )
    cpu_node_selector: Labels = Field(
        default_factory=dict, description="Labels of the preprocessing nodes."
    )
    resources: dict[LabelKey, int | Quantity] = Field(
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
    tls_secret: DnsName | None = Field(
        None,
        description=(
            "Secret with ca.crt, tls.crt and tls.key, mounted at preprocess.tls_ca, tls_cert and"
            " tls_key."
        ),
    )
    token_secret: DnsName | None = Field(
        None,
        description="Secret with the key token, mounted at preprocess.token_file.",
    )


class SkypilotSpec(Strict):
    """Settings of `disttrain train --emit skypilot` for SkyPilot."""

    infra: (
        Annotated[str, Form(r"^[A-Za-z0-9*][A-Za-z0-9_.:/*-]*$", "CLOUD, CLOUD/REGION")] | None
    ) = Field(
        None,
        description="Where to run, as SkyPilot writes it: kubernetes, aws/us-east-1, slurm/NAME.",
    )
    accelerator: (
        Annotated[str, Form(r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "letters, digits, . _ and -")] | None
    ) = Field(
        None,
        description="SkyPilot's name of the GPU, such as H100; its number is gpus_per_node.",
    )
    image: Image | None = Field(
        None,
        description="Docker image, built with the Dockerfile that --emit skypilot writes.",
    )
    volume: DnsName | None = Field(
        None,
        description=(
            "SkyPilot volume that holds the run file, runs/ and the data; none where all nodes see"
            " these anyway."
        ),
    )
    mount: Folder | None = Field(
        None,
        description="Folder at which it is mounted; --emit must see it there, too.",
    )
    use_spot: bool = Field(
        False, description="Ask for instances that may be taken away; the job then goes on anew."
    )
