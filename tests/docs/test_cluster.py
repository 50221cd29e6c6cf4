"""The scripts for clusters do what they say, as far as a machine without Slurm and Kubernetes can tell."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from piper.cli import app_with
from tests.workers.family import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "cluster"
RECIPE = """
import torch
from torch import nn

import piper


def job():
    return piper.Job(
        model=lambda: nn.Linear(4, 4),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
        strategy=piper.strategies.fsdp(dp=2),
        checkpoint=piper.Checkpoint(folder="saved"),
        steps=3,
    )
"""
SRUN = """#!/bin/bash
# Runs a command on each node of a job, all of them on this machine; with --nodelist, on that one alone.
nodes=$(seq 0 $((SLURM_NNODES - 1)))
while [[ $1 == --* ]]; do
    if [[ $1 == --nodelist=* ]]; then nodes=0; fi
    shift
done
if [ "$nodes" = 0 ]; then exec env SLURM_NODEID=0 "$@"; fi
for node in $nodes; do SLURM_NODEID=$node "$@" & done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""
SCONTROL = "#!/bin/bash\nfor _ in $(seq $SLURM_NNODES); do echo 127.0.0.1; done\n"
# The fields that KubeRay's definition of a RayJob has (ray.io/v1), and those of Kubernetes that the manifest uses.
JOB = {
    *("activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint"),
    *("entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata"),
    *("preRunningDeadlineSeconds", "rayClusterSpec", "runtimeEnvYAML", "shutdownAfterJobFinishes"),
    *("submissionMode", "submitterConfig", "submitterPodTemplate", "suspend", "ttlSecondsAfterFinished"),
}
CLUSTER = {
    *("authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions"),
    *("headGroupSpec", "headServiceAnnotations", "historyServerOptions", "managedBy", "networkPolicy"),
    *("rayVersion", "suspend", "tlsOptions", "upgradeStrategy", "workerGroupSpecs"),
}
HEAD = {
    *("enableIngress", "headService", "ingressOptions", "labels", "rayStartParams", "resources"),
    *("serviceType", "template"),
}
GROUP = {
    *("groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "priority"),
    *("rayStartParams", "replicas", "resources", "scaleStrategy", "suspend", "template"),
}


def shell_scripts() -> list[Path]:
    return [path for path in sorted(SCRIPTS.iterdir()) if path.suffix in (".sh", ".sbatch")]


@pytest.mark.parametrize("path", shell_scripts(), ids=lambda path: path.name)
def test_a_script_parses_and_its_commands_exist(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    text = path.read_text().replace("\\\n", " ")
    calls = [line.partition("piper ")[2] for line in text.splitlines() if " piper " in f" {line}"]
    words = [
        shlex.split(call.partition(" > ")[0].replace("'", "")) for call in calls if not call.startswith("-")
    ]
    verbs = [each for each in words if each and each[0] in ("train", "plan")]
    assert verbs, "no command of ours was found"
    for each in verbs:
        check_command([word for word in each if word not in ("$@", "piper")])


def check_command(words: list[str]) -> None:
    """Refuse a verb or option that the command line does not have."""
    commands = vars(typer.main.get_command(app_with()))["commands"]
    commands[words[0]].make_context(words[0], [*words[1:], *([] if len(words) > 1 else ["x.py:job"])])


def slurm(folder: Path, nodes: int, **more: str) -> dict[str, str]:
    """What a job of Slurm has in its environment, with programs that start its nodes here."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "net.py").write_text(RECIPE)
    return {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": str(nodes),
        "SLURM_GPUS_ON_NODE": "1",
        "PORT": str(free_port()),
        **more,
    }


def submit(script: str, folder: Path, environment: dict[str, str], *words: str) -> str:
    """Run a script as Slurm does on the first node of a job, and return what it printed."""
    done = subprocess.run(
        ["bash", SCRIPTS / script, "net.py:job", "run", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_slurm_trains_on_two_nodes_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    environment = slurm(tmp_path, 2)
    printed = submit("torchrun.sbatch", tmp_path, environment)
    assert "has no complete checkpoint yet: starting at the first step" in printed
    assert "Starting 2 devices on local" in printed
    assert steps(tmp_path / "run") == [1, 2, 3]
    again = submit("torchrun.sbatch", tmp_path, {**environment, "PORT": str(free_port())}, "--steps", "5")
    assert "after step 3" in again
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_machine(tmp_path: Path) -> None:
    submit("one-machine.sh", tmp_path, slurm(tmp_path, 1), "--device", "cpu")
    assert steps(tmp_path / "run") == [1, 2, 3]


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_job_of_slurm_trains_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    printed = submit("ray.sbatch", tmp_path, slurm(tmp_path, 2, RAY_worker_niceness="0"), "--device", "cpu")
    assert "Starting 2 devices on ray" in printed
    assert steps(tmp_path / "run") == [1, 2, 3]


def test_the_manifest_has_fields_of_a_rayjob() -> None:
    (manifest,) = yaml.safe_load_all((SCRIPTS / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"], [*manifest]) == (
        "ray.io/v1",
        "RayJob",
        ["apiVersion", "kind", "metadata", "spec"],
    )
    spec = manifest["spec"]
    cluster = spec["rayClusterSpec"]
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for fields, known in ((spec, JOB), (cluster, CLUSTER), (head, HEAD), (group, GROUP)):
        assert set(fields) <= known
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert cluster["authOptions"] == {"mode": "token"}
    for pod in (head, group):
        check_pod(pod["template"]["spec"])
        assert all(isinstance(value, str) for value in pod["rayStartParams"].values())
    program, *words = shlex.split(spec["entrypoint"])
    assert program == "piper"
    check_command(words)


def check_pod(pod: dict[str, Any]) -> None:
    """Refuse what a pod does not have: other fields, amounts that are no text, mounts without a volume."""
    assert set(pod) == {"containers", "volumes"}
    (container,) = pod["containers"]
    assert set(container) <= {"name", "image", "resources", "volumeMounts"}
    for amounts in container["resources"].values():
        assert all(isinstance(amount, str) for amount in amounts.values())
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert all(set(mount) == {"name", "mountPath"} for mount in container["volumeMounts"])
