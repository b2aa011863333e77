"""What Kubernetes and SkyPilot take, as far as our manifests use it.

Derived by hand from the API references: JobSet's jobset.x-k8s.io/v1alpha2 (0.10 and later: fields,
enumerations, its webhook's rules on names; jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2),
batch/v1 Job and core/v1 PodSpec of Kubernetes 1.31
(kubernetes.io/docs/reference/kubernetes-api/workload-resources), and SkyPilot's YAML specification
(docs.skypilot.co/en/latest/reference/yaml-spec.html). Fields that these have and manifests of ours
have not are left out, so that a wrong name is an error here as it is there.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

LABEL_1035 = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, Field(max_length=63, pattern=LABEL_1035)]
Subdomain = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]+)*$")
]
LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
]
Quantity = int | Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|k|[MGTPE]|[KMGTPE]i)?$")]


def _mount_path(path: str) -> str:
    assert PurePosixPath(path).is_absolute() and ":" not in path
    return path


class Object(BaseModel):
    """No field but those named, none of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Object):
    name: Name
    namespace: Subdomain | None = None
    labels: dict[str, LabelValue] = {}


class Claim(Object):
    claimName: Subdomain


class EmptyDir(Object):
    medium: Literal["", "Memory"] = ""
    sizeLimit: Quantity | None = None


class HostPath(Object):
    path: str
    type: str = ""


class Secret(Object):
    secretName: Subdomain


class Volume(Object):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None
    secret: Secret | None = None
    hostPath: HostPath | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        assert len(self.model_fields_set) == 2
        return self


class VolumeMount(Object):
    name: str
    mountPath: Annotated[str, AfterValidator(_mount_path)]
    subPath: str | None = None
    readOnly: bool = False


class Resources(Object):
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}

    @model_validator(mode="after")
    def _requests_within_limits(self) -> Resources:
        for name, limit in self.limits.items():
            assert self.requests.get(name, limit) == limit
            assert "." not in name or "/" in name  # extended resources have a domain
        return self


class KeySelector(Object):
    name: str
    key: str
    optional: bool = False


class EnvSource(Object):
    secretKeyRef: KeySelector | None = None
    configMapKeyRef: KeySelector | None = None


class EnvVar(Object):
    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: str = ""
    valueFrom: EnvSource | None = None


class Capabilities(Object):
    add: list[str] = []
    drop: list[str] = []


class SecurityContext(Object):
    capabilities: Capabilities | None = None
    privileged: bool = False
    runAsUser: int | None = None


class PodSecurityContext(Object):
    runAsUser: int | None = None
    runAsGroup: int | None = None
    fsGroup: int | None = None


class Container(Object):
    name: Name
    image: str
    command: list[str]
    env: list[EnvVar] = []
    resources: Resources
    volumeMounts: list[VolumeMount]
    securityContext: SecurityContext | None = None


class Toleration(Object):
    key: str = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    tolerationSeconds: int | None = None


class LocalReference(Object):
    name: Subdomain


class PodSpec(Object):
    restartPolicy: Literal["Always", "OnFailure", "Never"]
    nodeSelector: dict[str, LabelValue] = {}
    terminationGracePeriodSeconds: Annotated[int, Field(ge=0)]
    automountServiceAccountToken: bool = True
    serviceAccountName: Subdomain | None = None
    imagePullSecrets: list[LocalReference] = []
    tolerations: list[Toleration] = []
    securityContext: PodSecurityContext | None = None
    priorityClassName: Subdomain | None = None
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]

    @model_validator(mode="after")
    def _mounts(self) -> PodSpec:
        names = [volume.name for volume in self.volumes]
        assert len(names) == len({*names})
        for container in self.containers:
            assert {mount.name for mount in container.volumeMounts} == {*names}
            paths = [mount.mountPath for mount in container.volumeMounts]
            assert len(paths) == len({*paths})
        return self


class PodMetadata(Object):
    labels: dict[str, LabelValue] = {}
    annotations: dict[str, str] = {}


class PodTemplate(Object):
    metadata: PodMetadata = PodMetadata()
    spec: PodSpec


class ExitCodes(Object):
    containerName: str
    operator: Literal["In", "NotIn"]
    values: Annotated[list[int], Field(min_length=1, max_length=255)]

    @model_validator(mode="after")
    def _ordered(self) -> ExitCodes:
        assert self.values == sorted({*self.values}) and 0 not in self.values
        return self


class PodCondition(Object):
    type: str
    status: Literal["True", "False", "Unknown"]


class PodRule(Object):
    action: Literal["FailJob", "FailIndex", "Ignore", "Count"]
    onExitCodes: ExitCodes | None = None
    onPodConditions: list[PodCondition] = []

    @model_validator(mode="after")
    def _one_requirement(self) -> PodRule:
        assert (self.onExitCodes is None) == bool(self.onPodConditions)
        return self


class PodFailurePolicy(Object):
    rules: Annotated[list[PodRule], Field(max_length=20)]


class JobSpec(Object):
    completionMode: Literal["Indexed", "NonIndexed"]
    parallelism: Annotated[int, Field(ge=0)]
    completions: Annotated[int, Field(ge=0)]
    backoffLimit: Annotated[int, Field(ge=0)] | None = None
    podFailurePolicy: PodFailurePolicy | None = None
    template: PodTemplate

    @model_validator(mode="after")
    def _policy(self) -> JobSpec:
        """batch/v1 takes a pod failure policy with restartPolicy Never alone."""
        if self.podFailurePolicy is not None:
            assert self.template.spec.restartPolicy == "Never"
            containers = {container.name for container in self.template.spec.containers}
            for rule in self.podFailurePolicy.rules:
                assert rule.onExitCodes is None or rule.onExitCodes.containerName in containers
        assert self.template.spec.restartPolicy != "Always"
        return self


class JobTemplate(Object):
    spec: JobSpec


class ReplicatedJob(Object):
    name: str
    replicas: Annotated[int, Field(ge=0)] = 1
    template: JobTemplate


class Network(Object):
    enableDNSHostnames: bool = True
    subdomain: Name | None = None
    publishNotReadyAddresses: bool = True


class SuccessPolicy(Object):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[str] = []


class FailureRule(Object):
    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal[
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ]
    onJobFailureReasons: list[
        Literal[
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    ] = []
    onJobFailureMessagePatterns: list[str] = []
    targetReplicatedJobs: list[str] = []


class FailurePolicy(Object):
    maxRestarts: Annotated[int, Field(ge=0)] = 0
    restartStrategy: Literal["Recreate", "BlockingRecreate", "InPlaceRestart"] = "Recreate"
    rules: list[FailureRule] = []


class JobSetSpec(Object):
    network: Network
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


class JobSet(Object):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec

    @model_validator(mode="after")
    def _names(self) -> JobSet:
        """The webhook's rules: names of pods are labels, and jobs that policies name are there."""
        jobs = {job.name for job in self.spec.replicatedJobs}
        assert len(jobs) == len(self.spec.replicatedJobs)
        for job in self.spec.replicatedJobs:
            last = job.template.spec.completions - 1
            pod = f"{self.metadata.name}-{job.name}-{job.replicas - 1}-{last}-abcde"
            assert len(pod) <= 63, pod
        named = {*self.spec.successPolicy.targetReplicatedJobs}
        for rule in self.spec.failurePolicy.rules:
            named |= {*rule.targetReplicatedJobs}
        assert named <= jobs
        return self


# ---- SkyPilot ----------------------------------------------------------------------------------
class JobRecovery(Object):
    strategy: str | None = None
    max_restarts_on_errors: Annotated[int, Field(ge=0)] = 0
    recover_on_exit_codes: list[Annotated[int, Field(ge=0, le=255)]] = []


class SkyResources(Object):
    infra: str | None = None
    accelerators: dict[str, int | float] | None = None
    cpus: str | None = None
    image_id: Annotated[str, Field(pattern="^docker:")] | None = None
    use_spot: bool = False
    job_recovery: JobRecovery


class SkyTask(Object):
    name: str
    num_nodes: Annotated[int, Field(ge=1)]
    resources: SkyResources
    volumes: dict[Annotated[str, AfterValidator(_mount_path)], str] = {}
    run: str
