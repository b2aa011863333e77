"""`cluster.kubernetes` and `cluster.skypilot`: location and mounts of the ranks' containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.forms import Form

#: DNS label of RFC 1035, required for JobSet names: their pods' host names begin with it.
DNS_LABEL = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
DnsLabel = Annotated[
    str, Form(DNS_LABEL, "at most 63 of a-z, 0-9 and -, a letter first and no - last")
]
_WORD = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_NAME = rf"{_WORD}(\.{_WORD})*"
#: A DNS name by RFC 1123, which Kubernetes accepts for most other objects.
DnsName = Annotated[
    str,
    Form(
        rf"^(?=.{{1,253}}$){_NAME}$",
        "at most 253 of a-z, 0-9, . and -, a letter or digit at both ends of every part",
    ),
]
#: A DNS label by RFC 1123: names of namespaces, and of queues in the label that names one.
Namespace = Annotated[
    str, Form(rf"^(?=.{{1,63}}$){_WORD}$", "at most 63 of a-z, 0-9 and -, no - at an end")
]
_PART = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
#: Reference grammar of the distribution project; a registry has a dot or a port, or is localhost.
Image = Annotated[
    str,
    Form(
        rf"^(({_PART}(\.{_PART})+(:[0-9]+)?|{_PART}:[0-9]+|localhost)/)?{_PATH}(/{_PATH})*"
        r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,128})?$",
        "REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST, the name in small letters",
    ),
]
#: Kubernetes allows no colon in mount paths; a mount at a system folder would hide the image's
#: files.
Folder = Annotated[
    str,
    Form(
        r"^/(?!(bin|boot|dev|etc|lib|lib64|opt|proc|root|run|sbin|sys|usr|var)/*$)"
        r"(?!(dev|proc|sys|usr)/)(?!(.*/)?\.\.?(/|$))[^/:\x00-\x1f][^:\x00-\x1f]*$",
        "an absolute path inside the containers, without a colon or .., none of the system's",
    ),
]
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_WORDS = "at most 63 letters, digits, . _ and -, a letter or digit first and last"
LabelKey = Annotated[
    str, Form(rf"^((?=.{{1,253}}/){_NAME}/)?{_LABEL}$", f"[domain/]name; a name: {_LABEL_WORDS}")
]
LabelValue = Annotated[str, Form(f"^({_LABEL})?$", f"{_LABEL_WORDS}; or nothing")]
#: Resources without a domain are those built into Kubernetes.
Resource = Annotated[
    str,
    Form(
        rf"^(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{_NAME}/{_LABEL})$",
        "cpu, memory, ephemeral-storage, hugepages-SIZE or domain/name",
    ),
]
Quantity = Annotated[
    str,
    Form(
        r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$",
        "a quantity of Kubernetes, such as 8 or 1500Gi",
    ),
]
Labels = dict[LabelKey, LabelValue]

#: Keys of a PodSpec (core/v1) whose values are, or contain, only strings wherever they occur.
STRINGS = (
    "args command add drop values searches nameservers hostnames name value key operator effect"
    " image imagePullPolicy serviceAccountName priorityClassName preemptionPolicy schedulerName"
    " runtimeClassName nodeName workingDir mountPath mountPropagation subPath subPathExpr path"
    " type medium fieldPath resource topologyKey whenUnsatisfiable secretName claimName server"
    " driver fsType dnsPolicy restartPolicy procMount nodeSelector matchLabels labels annotations"
    " volumeAttributes"
)


def _types(value: Any, at: str, string: bool = False) -> Iterator[str]:
    """Yield a sentence for each value that Kubernetes would refuse or drop because of its type."""
    if value is None:
        yield f"{at}: the value is empty, and a patch removes nothing: leave out the key"
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{at}: YAML reads the key {key!r} as {_kind(key)}: put it in quotes"
            yield from _types(inner, f"{at}.{key}", string or key in STRINGS.split())
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            # entries of a list of mappings are checked by their own keys
            yield from _types(inner, f"{at}[{number}]", string and not isinstance(inner, dict))
    elif not isinstance(value, str) and (string or not isinstance(value, bool | int | float)):
        yield (
            f"{at}: Kubernetes wants a string, and YAML reads this as {_kind(value)}"
            f" ({value}): put it in quotes"
        )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def _check_types(spec: dict[str, Any]) -> dict[str, Any]:
    if wrong := list(_types(spec, "spec")):
        raise ValueError("; ".join(wrong))
    return spec


class PodMetadata(Strict):
    """Labels and annotations of pods."""

    labels: Labels = Field(default_factory=dict, description="Additional labels of every pod.")
    annotations: dict[LabelKey, str] = Field(
        default_factory=dict, description="Annotations of every pod."
    )


class PodPatch(Strict):
    """Additions to the pods of a JobSet, in the form of Kubernetes' PodTemplateSpec."""

    metadata: PodMetadata = Field(
        default_factory=PodMetadata, description="Labels and annotations of the pods."
    )
    spec: Annotated[dict[str, Any], AfterValidator(_check_types)] = Field(
        default_factory=dict,
        description="Fields of a PodSpec (core/v1), such as tolerations; entries of `containers`"
        " are named ranks or data.",
    )


class KubernetesSpec(Strict):
    """Settings of `disttrain train --emit jobset` for Kubernetes."""

    name: DnsLabel | None = Field(
        None, description="Name of the JobSet; by default the run's name."
    )
    namespace: Namespace | None = Field(None, description="Namespace of the JobSet.")
    image: Image | None = Field(
        None,
        description="Image of all containers, built with the Dockerfile that --emit jobset writes.",
    )
    claim: DnsName | None = Field(
        None,
        description="Persistent volume claim (ReadWriteMany) that holds the run file, runs/ and"
        " the data.",
    )
    mount: Folder | None = Field(
        None,
        description="Folder where the pods mount the claim; it must also exist where --emit runs,"
        " which writes absolute paths.",
    )
    queue: Namespace | None = Field(
        None, description="Kueue's LocalQueue; by default no label is set."
    )
    node_selector: Labels = Field(
        default_factory=dict, description="Node selector of the pods with GPUs."
    )
    cpu_node_selector: Labels = Field(
        default_factory=dict, description="Node selector of the preprocessing pods."
    )
    resources: dict[Resource, Annotated[int, Field(ge=0)] | Quantity] = Field(
        default_factory=dict,
        description="Additional resources of every pod with ranks, requested and limited, such as"
        " memory: 1500Gi or rdma/ib: 8; cpu replaces the number of cores determined for the ranks.",
    )
    grace_s: int = Field(
        300,
        ge=10,
        le=86_400,
        description="Grace period in seconds in which pods end their step and write a checkpoint"
        " when they are terminated.",
    )
    tls_secret: DnsName | None = Field(
        None,
        description="Secret with ca.crt, tls.crt and tls.key, mounted at preprocess.tls_ca,"
        " tls_cert and tls_key.",
    )
    token_secret: DnsName | None = Field(
        None, description="Secret with the key token, mounted at preprocess.token_file."
    )
    pod_patch: PodPatch = Field(
        default_factory=PodPatch,
        description="Additions to the pods (tolerations, pull secrets, env, security context, size"
        " of /dev/shm), merged as described in docs/howto/kubernetes.md; nothing that the job"
        " needs may be changed.",
    )


class SkypilotSpec(Strict):
    """Settings of `disttrain train --emit skypilot` for SkyPilot."""

    infra: (
        Annotated[str, Form(r"^[A-Za-z0-9*][A-Za-z0-9_.:/*-]*$", "CLOUD, CLOUD/REGION")] | None
    ) = Field(
        None,
        description="Infrastructure in SkyPilot's notation: kubernetes, aws/us-east-1, slurm/NAME.",
    )
    accelerator: (
        Annotated[str, Form(r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "letters, digits, . _ and -")] | None
    ) = Field(
        None,
        description="SkyPilot's name of the GPU, such as H100; the number of GPUs is"
        " gpus_per_node.",
    )
    image: Image | None = Field(
        None, description="Docker image, built with the Dockerfile that --emit skypilot writes."
    )
    volume: DnsName | None = Field(
        None,
        description="SkyPilot volume with the run file, runs/ and the data; none if all nodes"
        " share these already.",
    )
    mount: Folder | None = Field(
        None,
        description="Folder where the volume is mounted; it must also exist where --emit runs.",
    )
    use_spot: bool = Field(
        False, description="Request spot instances; after a preemption the job is restarted."
    )
