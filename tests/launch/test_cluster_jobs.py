"""Jobs that the files in examples/cluster really start, with fakes of what this machine lacks."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from distributary.launch import free_addresses
from tests.launch.conftest import wait_until

_FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
_SECONDS = 300
_ENVIRON = {
    **{k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "PJRT_NPROC")},
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "JAX_PLATFORMS": "cpu",
    "DISTRIBUTARY_TOKEN": "0123456789abcdef",
}


def test_pods_of_a_trainjob_resume_after_a_worker_is_killed(tmp_path):
    yaml = pytest.importorskip("yaml")
    np.save(tmp_path / "images.npy", np.random.default_rng(0).random((400, 8, 8, 1), np.float32))
    np.save(tmp_path / "labels.npy", np.arange(400) % 10)
    _, job = yaml.safe_load_all((_FOLDER / "trainjob.yaml").read_text())
    (command,) = job["spec"]["trainer"]["args"]
    command = f"{command.replace('/storage', str(tmp_path))} --data {tmp_path} --epochs 40"
    # What Kubeflow Trainer sets in a pod.
    environ = {
        "JAX_NUM_PROCESSES": "2",
        "JAX_COORDINATOR_ADDRESS": free_addresses("127.0.0.1", 1)[0],
    }
    pods = [
        subprocess.Popen(
            ["sh", "-c", command],
            cwd=_FOLDER,
            env=_ENVIRON | environ | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (0, 1)
    ]
    try:
        written = (tmp_path / "checkpoints" / "training_metadata.json").exists
        wait_until(written, "the workers have trained an epoch")
        (worker,) = (
            process
            for process in psutil.Process(pods[1].pid).children(recursive=True)
            if process.cmdline()[1:2] == ["train.py"]
        )
        worker.send_signal(signal.SIGKILL)
        output, _ = [pod.communicate(timeout=_SECONDS)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()

    assert [pod.returncode for pod in pods] == [0, 0], output
    assert "worker 1 was ended by SIGKILL" in output
    assert output.count(" Epoch 1/40\n") == 1  # the second start continues
    trained = re.search(r"Trained (\d+) of 40 epochs on .*: 2 replicas", output)
    assert trained is not None, output
    assert 0 < int(trained[1]) < 40
    assert (tmp_path / "checkpoints" / "model.keras").exists()


_STUB = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
place = config["task"]["index"], len(config["cluster"]["worker"]), os.environ["SLURM_NODEID"]
print(*place, os.environ["SLURM_CPUS_PER_TASK"], *sys.argv[1:])
"""
_SRUN = """#!/bin/bash
printf '%s\\n' "$@" >> "$SLURM_SUBMIT_DIR/srun"
while [[ $1 = --* ]]; do shift; done
for number in 0 1; do SLURM_NODEID=$number "$@" & done
wait -n && wait -n
"""


def _programs(folder, **texts):
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": os.pathsep.join([str(folder), _ENVIRON["PATH"]])}


def test_the_slurm_script_starts_a_launcher_in_a_container_of_every_machine(tmp_path):
    image = "registry.example#train:1"
    (tmp_path / "train.py").write_text(_STUB)
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "16"}
    environ |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(os.getpid()), "IMAGE": image}
    scontrol = '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && echo 127.0.0.1 && echo other\n'
    environ |= _programs(tmp_path / "programs", srun=_SRUN, scontrol=scontrol)
    script = (_FOLDER / "slurm.sh").read_text().replace("/app/train.py", "train.py")

    output = subprocess.check_output(
        ["bash", "-c", script], env=_ENVIRON | environ, cwd=tmp_path, text=True, timeout=_SECONDS
    )

    places = sorted(line.partition("] ")[2] for line in output.splitlines())
    arguments = f"16 --checkpoints {tmp_path}/checkpoints"
    assert places == [f"0 2 0 {arguments}", f"1 2 1 {arguments}"]
    options = (tmp_path / "srun").read_text().partition("bash\n")[0].splitlines()
    mounts = f"--container-mounts={tmp_path}:{tmp_path}"
    common = ["--cpus-per-task=16", "--kill-on-bad-exit=1"]
    assert options == [*common, f"--container-image={image}", mounts]


_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
NodeName=127.0.0.1 NodeHostname=127.0.0.1 Port={ports[1]} CPUs=16 Gres=gpu:8
NodeName=127.0.0.2 NodeHostname=127.0.0.2 Port={ports[2]} CPUs=16 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
SlurmdParameters=config_overrides
"""  # without checks of passwords, and with more CPUs than there are


@pytest.fixture
def slurm(tmp_path):
    """The environment of a real Slurm with two machines, whose addresses are of loopback."""
    if shutil.which("slurmctld") is None or getpass.getuser() != "root":
        pytest.skip("starts slurmctld and slurmd, as root")
    folder = tmp_path / "slurm"
    folder.mkdir()
    addresses = free_addresses("127.0.0.1", 3)
    ports = [address.rpartition(":")[2] for address in addresses]
    values = dict(host=socket.gethostname(), ports=ports, user="root", folder=folder)
    (folder / "slurm.conf").write_text(_CONFIG.format(**values))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):
        (folder / f"gpu{number}").touch()
    environ = _ENVIRON | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N127.0.0.1"],
        ["slurmd", "-D", "-N127.0.0.2"],
    ]
    with open(folder / "output", "wb") as output:
        started = [
            subprocess.Popen(daemon, env=environ, stdout=output, stderr=output)
            for daemon in daemons
        ]
    yield environ
    for daemon in reversed(started):
        daemon.terminate()
        daemon.wait(_SECONDS)


def test_slurm_runs_the_script(slurm, tmp_path):
    (tmp_path / "train.py").write_text(_STUB)

    subprocess.run(
        ["sbatch", "--wait", "--nodes=2", "--output=output", _FOLDER / "slurm.sh"],
        env=slurm,
        cwd=tmp_path,
        timeout=_SECONDS,
        check=True,
    )

    output = (tmp_path / "output").read_text()
    places = sorted(line.partition("] ")[2] for line in output.splitlines())
    arguments = f"16 --checkpoints {tmp_path}/checkpoints"
    assert places == [f"0 2 0 {arguments}", f"1 2 1 {arguments}"], output


_GCLOUD = """#!/bin/bash
printf '%s ' "${@:4}" >> "$HOME/calls"; echo >> "$HOME/calls"
[[ $4 = describe ]] && exit 1
[[ $4 = ssh && ${!#} = *train.py* ]] || exit 0
cd "$HOME" && bash -c "${!#/#--command=/}"
"""
_PYTHON = """#!/bin/bash
echo "$@" >> "$HOME/runs"
[[ $(wc -l < "$HOME/runs") = 2 ]]  # the first start fails
"""


def test_hosts_of_a_tpu_slice_start_again_after_a_failure(tmp_path):
    environ = {"HOME": str(tmp_path), "FILESTORE": "10.0.0.2:/share"}
    environ |= _programs(tmp_path / "programs", gcloud=_GCLOUD, sleep="#!/bin/sh\n")
    (tmp_path / "env").mkdir()
    _programs(tmp_path / "env" / "bin", python=_PYTHON)

    command = ["bash", str(_FOLDER / "tpu_slice.sh"), "my-tpu", "my-zone"]
    subprocess.run(command, env=_ENVIRON | environ, timeout=_SECONDS, check=True)

    calls = (tmp_path / "calls").read_text()
    assert re.findall(r"^(\w+) ", calls, re.M)[:4] == ["describe", "create", "scp", "ssh"]
    assert "10.0.0.2:/share" in calls
    runs = (tmp_path / "runs").read_text()
    assert runs == 2 * "train.py --tpu --checkpoints /mnt/train\n"
