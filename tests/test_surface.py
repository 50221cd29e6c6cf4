"""The whole public surface. Growth is a visible change to this file."""

import subprocess
import sys
from dataclasses import fields

import typer

import piper
from piper.cli import app_with


def test_public_names() -> None:
    assert piper.__all__ == [
        "Buckets",
        "CaptureError",
        "Checkpoint",
        "ConfigError",
        "Directive",
        "Evaluate",
        "Job",
        "LaunchError",
        "PiperError",
        "Run",
        "ScheduleError",
        "WorkerError",
        "annotate",
        "annotate_layers",
        "annotate_modules",
        "at",
        "average",
        "callbacks",
        "checkpoint",
        "compile",
        "data",
        "export_hf",
        "grouped_mm",
        "import_hf",
        "launch",
        "losses",
        "offload",
        "order",
        "place",
        "precision",
        "protect",
        "remat",
        "replicate",
        "route",
        "schedules",
        "shard",
        "sharding_rule",
        "split",
        "strategies",
        "tensor_plan",
        "tune",
        "unroute",
    ]
    assert all(getattr(piper, name) is not None for name in piper.__all__)


def test_launch_stays_a_function_when_its_room_is_imported() -> None:
    import piper.run.launch

    assert piper.launch is piper.run.launch.launch


def test_losses() -> None:
    assert piper.losses.__all__ == ["cross_entropy", "fused_cross_entropy", "huggingface"]


def test_job_fields() -> None:
    assert [field.name for field in fields(piper.Job)] == [
        "model",
        "loss",
        "data",
        "strategy",
        "optimizer",
        "scheduler",
        "precision",
        "clip_norm",
        "steps",
        "seed",
        "checkpoint",
        "evaluate",
        "callbacks",
        "buckets",
        "elastic",
        "initial",
    ]
    assert [field.name for field in fields(piper.Evaluate)] == ["data", "every", "metrics"]
    assert [field.name for field in fields(piper.Checkpoint)] == ["folder", "every", "keep"]


def test_schedules() -> None:
    assert piper.schedules.__all__ == [
        "Memory",
        "Placement",
        "StageCosts",
        "Synthesised",
        "bound",
        "dualpipe",
        "dualpipe_v",
        "from_csv",
        "gpipe",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "one_f_one_b",
        "pairs",
        "synthesise",
        "v_half",
        "v_min",
        "zbv",
        "zero_bubble",
    ]


def test_a_verb_is_registered_once() -> None:
    verbs = [verb.callback for verb in app_with().registered_commands]
    assert len(verbs) == len(set(verbs))


def test_verbs_and_flags() -> None:
    command = typer.main.get_command(app_with())
    verbs = {
        name: sorted(option for param in verb.params for option in param.opts if option != "--help")
        for name, verb in command.commands.items()  # type: ignore[attr-defined]
    }
    assert verbs == {
        "check": ["--compile", "--device", "--json", "--on", "--steps", "--strategy", "--tol", "recipe"],
        "plan": ["--compile", "--device", "--json", "--strategy", "--text", "--why", "recipe"],
        "train": [
            "--cluster",
            "--compile",
            "--detect-nan",
            "--device",
            "--grace",
            "--graphs",
            "--json",
            "--on",
            "--out",
            "--profile",
            "--resume",
            "--retries",
            "--share",
            "--spares",
            "--stall",
            "--steps",
            "--strategy",
            "recipe",
        ],
        "simulate": ["--cluster", "--compile", "--costs", "--json", "--strategy", "recipe"],
        "profile": [
            "--also",
            "--calibrate",
            "--cluster",
            "--cluster-out",
            "--json",
            "--on",
            "--steps",
            "target",
        ],
        "diff": ["--cluster", "--costs", "--json", "a", "b"],
        "init": ["--json", "name"],
        "export": ["--dtype", "--format", "--json", "--recipe", "--to", "folder", "run"],
        "import": ["--json", "--out", "recipe", "weights"],
        "schedule": [
            "--costs",
            "--csv",
            "--json",
            "--last",
            "--memory",
            "--microbatches",
            "--ranks",
            "--stages-per-rank",
            "--svg",
            "name",
        ],
        "tune": [
            "--cluster",
            "--compile",
            "--costs",
            "--devices",
            "--json",
            "--lengths",
            "--measure",
            "--memory",
            "--out",
            "--python",
            "--start",
            "--trials",
            "--workers",
            "recipe",
        ],
        "selftest": ["--compile", "--device", "--devices", "--json", "--only", "--out"],
        "view": [
            "--cluster",
            "--compile",
            "--costs",
            "--json",
            "--out",
            "--strategy",
            "--svg",
            "--trace",
            "target",
        ],
    }


def test_modules_that_scripts_read_are_there_without_an_import_of_their_own() -> None:
    program = (
        "import piper\nprint(piper.errors.ScheduleError, piper.job.Job, piper.ir, piper.directives.place)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=30, check=False)
    assert done.returncode == 0


def test_importing_piper_does_not_pay_for_torch() -> None:
    program = "import sys, piper\nsys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], timeout=30, check=False)
    assert done.returncode == 0
