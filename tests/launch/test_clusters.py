"""The fields and commands of the files in examples/cluster; test_cluster_jobs.py runs them."""

import copy
import re
import shlex
import tomllib
from pathlib import Path
from string import Template

import pytest

from distributary.tools.cli import launch_options

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "examples" / "cluster"


# The fields that the files use, as the references of the APIs have them: Kubernetes 1.33 (batch/v1,
# core/v1), JobSet v1alpha2, Kubeflow Trainer v1alpha1, Kubeflow's training operator v1.


def _of(*required, **properties):
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)}


def _list(items):
    return {"type": "array", "items": items, "minItems": 1}


_TEXT, _NUMBER, _TRUTH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
_QUANTITIES = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_METADATA = _of(name=_TEXT, labels=_TEXTS)
_SECRET_KEY = _of("name", "key", name=_TEXT, key=_TEXT)
_ENV = _list(_of("name", name=_TEXT, value=_TEXT, valueFrom=_of(secretKeyRef=_SECRET_KEY)))
_VOLUME = _of(
    "name",
    name=_TEXT,
    persistentVolumeClaim=_of("claimName", claimName=_TEXT),
    emptyDir=_of(medium={"const": "Memory"}, sizeLimit=_TEXT),
    secret=_of(secretName=_TEXT, items=_list(_of("key", "path", key=_TEXT, path=_TEXT))),
)
_CONTAINER = _of(
    "name",
    name=_TEXT,
    image=_TEXT,
    command=_list(_TEXT),
    args=_list(_TEXT),
    env=_ENV,
    ports=_list(_of("containerPort", name=_TEXT, containerPort=_NUMBER)),
    resources=_of(limits=_QUANTITIES),
    volumeMounts=_list(_of("name", "mountPath", name=_TEXT, mountPath=_TEXT, readOnly=_TRUTH)),
)
_POD = _of(
    "containers",
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=_NUMBER,
    containers=_list(_CONTAINER),
    volumes=_list(_VOLUME),
)
_JOB = _of(
    "template",
    parallelism=_NUMBER,
    completions=_NUMBER,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=_NUMBER,
    template=_of("spec", spec=_POD),
)
_REPLICATED_JOB = _of(
    "name", "template", name=_TEXT, replicas=_NUMBER, template=_of(metadata=_METADATA, spec=_JOB)
)
_JOBSET = _of(
    "replicatedJobs",
    network=_of(enableDNSHostnames=_TRUTH, subdomain=_TEXT),
    failurePolicy=_of(maxRestarts=_NUMBER),
    replicatedJobs=_list(_REPLICATED_JOB),
)
_REPLICA = _of(
    "template",
    replicas=_NUMBER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_of("spec", spec=_POD),
)
_SPECS = {
    "v1 PersistentVolumeClaim": _of(
        "accessModes", accessModes=_list(_TEXT), resources=_of(requests=_QUANTITIES)
    ),
    "jobset.x-k8s.io/v1alpha2 JobSet": _JOBSET,
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": _of(
        "template", mlPolicy=_of(numNodes=_NUMBER, jax=_of()), template=_of("spec", spec=_JOBSET)
    ),
    "trainer.kubeflow.org/v1alpha1 TrainJob": _of(
        "runtimeRef",
        runtimeRef=_of("name", apiGroup=_TEXT, kind=_TEXT, name=_TEXT),
        trainer=_of(
            image=_TEXT,
            numNodes=_NUMBER,
            resourcesPerNode=_of(limits=_QUANTITIES),
            env=_ENV,
            command=_list(_TEXT),
            args=_list(_TEXT),
        ),
    ),
    "kubeflow.org/v1 TFJob": _of(
        "tfReplicaSpecs",
        runPolicy=_of(backoffLimit=_NUMBER, cleanPodPolicy={"enum": ["All", "Running", "None"]}),
        tfReplicaSpecs=_of(Chief=_REPLICA, Worker=_REPLICA, PS=_REPLICA),
    ),
}


def _documents():
    files = sorted(_FOLDER.glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def _problems(document):
    spec = _SPECS[f"{document['apiVersion']} {document['kind']}"]
    schema = _of("metadata", "spec", apiVersion=_TEXT, kind=_TEXT, metadata=_METADATA, spec=spec)
    return [
        error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


def _objects(value, name=""):
    """Yields every object in a document whose keys are fields, not names of the user."""
    if isinstance(value, dict):
        if name not in ("labels", "limits", "requests"):
            yield value
        for key, child in value.items():
            yield from _objects(child, key)
    for child in value if isinstance(value, list) else ():
        yield from _objects(child)


@pytest.mark.parametrize("document", _documents(), ids=lambda document: document["kind"])
def test_the_fields_of_manifests_are_those_of_their_api(document):
    assert _problems(document) == []
    for number, _ in enumerate(_objects(document)):
        wrong = copy.deepcopy(document)
        list(_objects(wrong))[number]["gpus"] = 8
        assert "('gpus' was unexpected)" in " ".join(_problems(wrong)), number


def _find(kind):
    return next(document["spec"] for document in _documents() if document["kind"] == kind)


def _command(pod):
    shell, command = pod["command"], pod["args"][0]
    assert shell == ["sh", "-c"]
    return command


def test_pods_have_gpus_shared_memory_and_the_volume():
    jobset, runtime = _find("JobSet"), _find("TrainingRuntime")["template"]["spec"]
    trainer = _find("TrainJob")["trainer"]
    for jobs in (jobset, runtime):
        pod = jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        asked = container if jobs is jobset else trainer
        options = _options(_command(asked), JAX_COORDINATOR_ADDRESS="a:1")

        limits = asked.get("resources", trainer["resourcesPerNode"])["limits"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert limits == {"nvidia.com/gpu": 8}
        assert mounts == {"storage": "/storage", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
        assert options.grace_seconds < pod["terminationGracePeriodSeconds"]


def _options(command, **environ):
    """Returns the options of a command, in which a shell expands the variables of a pod."""
    numbers = {"JOB_COMPLETION_INDEX": "3", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    words = shlex.split(Template(command).substitute(numbers | environ))
    assert words[:2] == ["exec", "distributary"]
    return launch_options(words[2:], {"DISTRIBUTARY_TOKEN": "0123456789abcdef"})


def test_launchers_of_pods_meet_at_the_name_that_pod_0_has():
    jobset, (workers,) = _find("JobSet"), _find("JobSet")["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    # Trainer names its JobSet like the job, and JobSet its pods like this.
    address = f"train-workers-0-0.{jobset['network']['subdomain']}:29500"
    trainer = _find("TrainJob")["trainer"]

    for command, expected in (
        (_command(container), address),
        (_command(trainer), "train-node-0-0.train:29500"),
    ):
        hosts = _options(command, JAX_COORDINATOR_ADDRESS="train-node-0-0.train:29500").hosts

        assert (hosts.master, hosts.num_hosts, hosts.host_rank) == (expected, 4, 3)
    assert job["parallelism"] == job["completions"] == trainer["numNodes"] == 4


def test_the_image_has_what_the_manifests_run():
    text = (_FOLDER / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    manifests = " ".join(file.read_text() for file in _FOLDER.glob("*.yaml"))

    assert [name for name in copied if not (_ROOT / name).exists()] == []
    assert set(re.findall(r"\w+\.py", manifests)) == {Path(n).name for n in copied if ".py" in n}
    for value in re.findall(r"EXTRAS=([\w,]+)", text):
        assert set(value.split(",")) <= set(extras["optional-dependencies"])
