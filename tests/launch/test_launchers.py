"""What the launchers would do, what they refuse, and how a run is started again."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
KEY = "sk-not-to-be-seen"


def bash(script, *args, **variables):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *args], capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | variables)


TRAIN = ["experiments.train_rl", "--run_dir=/dev/null/run"]
POD = {"NAME": "pod", "ZONE": "us-west4-a"}
ODD = ["--run_dir=/s/a b", """--note=it's "x" $(HOME) & \\ """]
JOBSET = {"NAME": "w", "IMAGE": "i", "CLAIM": "disk", "ACCELERATOR": "tpu-v5-lite-podslice",
          "TOPOLOGY": "8x8", "HOSTS": "16"}
XPK = {"CLUSTER": "lab", "NAME": "w", "DEVICE": "v5litepod-64", "IMAGE": "image"}


def words(result):
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


def remote(line):
    """Returns the text that the workers' shells get."""
    return next(word for word in line if word.startswith("--command=")).removeprefix("--command=")


def test_a_slice_is_created_and_deleted():
    (made,) = words(bash("tpu_pod.sh", "--dry_run", "create", PROJECT="p", **POD))
    assert made == ["gcloud", "compute", "tpus", "tpu-vm", "create", "pod", "--zone=us-west4-a",
                    "--project=p", "--accelerator-type=v5litepod-64",
                    "--version=v2-alpha-tpuv5-lite"]
    queued, asked = words(bash("tpu_pod.sh", "--dry_run", "create", QUEUED="1", SPOT="1", **POD))
    assert queued[3:] == [
        "queued-resources", "create", "pod", "--node-id=pod", "--zone=us-west4-a",
        "--accelerator-type=v5litepod-64", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"]
    assert asked[3:7] == ["queued-resources", "describe", "pod", "--zone=us-west4-a"]
    (gone,) = words(bash("tpu_pod.sh", "--dry_run", "delete", **POD))
    assert gone[3:] == ["tpu-vm", "delete", "pod", "--zone=us-west4-a", "--quiet"]
    (gone,) = words(bash("tpu_pod.sh", "--dry_run", "delete", QUEUED="1", **POD))
    assert gone[3:] == ["queued-resources", "delete", "pod", "--zone=us-west4-a", "--force",
                        "--quiet"]


def test_every_worker_runs_the_same_command_and_the_key_stays_hidden():
    result = bash("tpu_pod.sh", "--dry_run", "run", "experiments.train_rl", *ODD,
                  MEMCALIB_JUDGE_API_KEY=KEY, **POD)
    sent, started = words(result)
    assert KEY not in result.stdout + result.stderr
    assert sent[3:] == ["tpu-vm", "scp", "memcalib_keys", "pod:.memcalib_keys", "--zone=us-west4-a",
                        "--worker=all"]
    assert "--worker=all" in started
    shown = shlex.split(remote(started).split("> status' sh ")[1].split(" > run.log")[0])
    assert shown == ["bash", "launch/restart.sh", ".venv/bin/python", "-m",
                     "experiments.train_rl", *ODD, "--multihost"]


def test_training_goes_from_creation_to_deletion():
    result = bash("tpu_pod.sh", "--dry_run", "train", "experiments.train_rl", "--run_dir=/s", **POD)
    lines = [line for line in words(result) if line[0] == "gcloud"]
    assert [line[4] for line in lines] == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    assert [next((word for word in line if word.startswith("--worker")), "") for line in lines] == [
        "", "--worker=all", "--worker=all", "--worker=all", "--worker=0", "--worker=all", ""]
    install, _, asked, logs = (remote(line) for line in lines if line[4] == "ssh")
    assert "-e . 'jax[tpu]'" in install
    assert asked.endswith("launch/restart.sh --saved_step /s") and logs == "cat memcalib/run.log"


def stand_in(folder, name, body):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


GCLOUD = r"""
echo "$4 ${*: -1}" >> "$CALLS"
case "$*" in
*"scp "*memcalib_keys*) stat -c %a "$5" >> "$CALLS"; grep -c "$KEY" "$5" >> "$CALLS" ;;
*"ssh "*saved_step*)
    answer="$(head -n 1 "$ANSWERS")"; sed -i 1d "$ANSWERS"
    if [ "$answer" = lost ]; then exit 255; fi
    printf '%b\n' "$answer" ;;
*describe*) echo PREEMPTED ;;
esac"""


def train_on_slices(tmp_path, answers):
    path = stand_in(tmp_path / "bin", "gcloud", GCLOUD)
    (tmp_path / "answers").write_text("".join(rf"{answer}" + "\n" for answer in answers))
    result = bash("tpu_pod.sh", "train", "experiments.train_rl", "--run_dir=/s", PATH=path,
                  CALLS=str(tmp_path / "calls"), ANSWERS=str(tmp_path / "answers"), KEY=KEY,
                  LOGS=str(tmp_path / "logs"), MEMCALIB_JUDGE_API_KEY=KEY, POLL_SECONDS="0",
                  RESTART_SECONDS="0", RESTARTS_WITHOUT_PROGRESS="2", **POD)
    calls = (tmp_path / "calls").read_text()
    assert KEY not in calls + result.stdout + result.stderr
    return result, calls.splitlines()


def test_a_slice_that_is_taken_away_is_made_again(tmp_path):
    result, calls = train_on_slices(
        tmp_path, [r"running\n30", "lost", r"running\n60", r"0\n125"])
    assert result.returncode == 0, result.stderr
    assert [call.split()[0] for call in calls if call.startswith(("create", "delete"))] == [
        "create", "delete"] * 2
    assert calls[calls.index("scp --worker=all") + 2:][:3] == ["scp --worker=all", "600", "1"]


@pytest.mark.parametrize("answers, status, slices", [
    ([r"2\n0"], 2, 1), (["lost"] * 3, 1, 2), ([r"running\n30", "lost", "lost", "lost"], 1, 3)])
def test_slices_are_not_made_for_ever(tmp_path, answers, status, slices):
    result, calls = train_on_slices(tmp_path, answers)
    assert result.returncode == status
    assert sum(call.startswith("create") for call in calls) == slices
    assert sum(call.startswith("delete") for call in calls) == slices


def test_a_workload_on_a_cluster():
    result = bash("xpk.sh", "--dry_run", "experiments.train_rl", *ODD,
                  MEMCALIB_JUDGE_API_KEY=KEY, SLICES="2", **XPK)
    (line,) = words(result)
    assert KEY not in result.stdout
    assert line == [
        "xpk", "workload", "create", "--cluster=lab", "--workload=w", "--docker-image=image",
        "--tpu-type=v5litepod-64", "--num-slices=2", "--max-restarts=100",
        "--restart-on-exit-codes=75", "--termination-grace-period-seconds=120",
        "--env-file=NAMES_FILE", line[-1]]
    assert shlex.split(remote(line)) == [
        "bash", "launch/restart.sh", "--once", "python", "-m", "experiments.train_rl", *ODD,
        "--multihost"]
    (line,) = words(bash("xpk.sh", "--dry_run", "experiments.train_rl", "--run_dir=/s", GPU="1",
                         NODES="4", **XPK | {"DEVICE": "h100-80gb-8"}))
    assert line[6:8] == ["--device-type=h100-80gb-8", "--num-nodes=4"]


def test_xpk_gets_the_key_by_name_alone(tmp_path):
    path = stand_in(tmp_path / "bin", "xpk", r"""
for word in "$@"; do case "$word" in --env-file=*) cat "${word#*=}" ;; esac; done; echo "$@" """)
    result = bash("xpk.sh", "experiments.train_rl", "--run_dir=/s", PATH=path,
                  MEMCALIB_JUDGE_API_KEY=KEY, **XPK)
    assert result.stdout.splitlines()[0] == "MEMCALIB_JUDGE_API_KEY" and KEY not in result.stdout


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize("script, args, variables, said", [
    ("tpu_pod.sh", ["create"], {"ZONE": "z"}, "NAME is not set"),
    ("tpu_pod.sh", ["create"], {"NAME": "n"}, "ZONE is not set"),
    ("tpu_pod.sh", [], POD, "say what to do"),
    ("tpu_pod.sh", ["fly"], POD, "unknown action fly"),
    ("tpu_pod.sh", ["--dryrun", "create"], POD, "unknown option --dryrun"),
    ("tpu_pod.sh", ["delete", "everything"], POD, "delete takes no everything"),
    ("tpu_pod.sh", ["run"], POD, "run needs a program"),
    ("tpu_pod.sh", ["train", "experiments.train_rl"], POD, "no --run_dir="),
    ("xpk.sh", TRAIN, without(XPK, "IMAGE"), "IMAGE is not set"),
    ("xpk.sh", [], XPK, "give a program"),
    ("xpk.sh", ["--dryrun", *TRAIN], XPK, "unknown option --dryrun"),
    ("jobset.sh", TRAIN, without(JOBSET, "CLAIM"), "CLAIM is not set"),
    ("jobset.sh", TRAIN, JOBSET | {"HOSTS": "many"}, "HOSTS=many is no number"),
    ("jobset.sh", TRAIN, JOBSET | {"IMAGE": "a: b"}, "IMAGE=a: b is no name"),
    ("jobset.sh", [*TRAIN, "--note=a\nb"], JOBSET, "a line break"),
    ("jobset.sh", ["--dryrun", *TRAIN], JOBSET, "unknown option --dryrun"),
    ("slurm.sbatch", [], {}, "give a program"),
    ("slurm.sbatch", ["--dryrun", *TRAIN], {}, "unknown option --dryrun"),
    ("slurm.sbatch", TRAIN, {"TASKS": "core"}, "TASKS=core: node or gpu"),
    ("slurm.sbatch", TRAIN, {"TASKS": "gpu"}, "the job has no GPUs"),
    ("restart.sh", [], {}, "give a command"),
    ("restart.sh", ["--twice", *TRAIN], {}, "unknown option --twice"),
    ("restart.sh", ["true"], {}, "no --run_dir="),
    ("restart.sh", TRAIN, {"RESTARTS_WITHOUT_PROGRESS": "0"}, "is no number above 0")])
def test_mistakes_get_one_plain_line(script, args, variables, said):
    result = bash(script, *args, **variables)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and said in line and result.stdout == ""


def test_a_jobset_is_filled_in():
    yaml = pytest.importorskip("yaml")
    result = bash("jobset.sh", "--dry_run", "experiments.train_rl", *ODD,
                  MEMCALIB_JUDGE_API_KEY=KEY, NAMESPACE="lab", **JOBSET)
    assert KEY not in result.stdout + result.stderr
    assert "secret w-keys" in result.stdout and "${" not in result.stdout.split("apiVersion")[1]
    filled = yaml.safe_load(result.stdout)
    assert filled["metadata"]["name"] == "w" and filled["metadata"]["namespace"] == "lab"
    job = filled["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 16
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75, 137, 143]
    container = job["template"]["spec"]["containers"][0]
    assert container["command"] == [
        "bash", "launch/restart.sh", "--once", "python", "-m", "experiments.train_rl", ODD[0],
        ODD[1].replace("$(", "$$("), "--multihost"]  # as Kubernetes writes a plain $(
    assert container["resources"]["limits"]["google.com/tpu"] == 4
    assert container["envFrom"] == [{"secretRef": {"name": "w-keys", "optional": True}}]


def test_kubectl_gets_the_key_on_standard_input(tmp_path):
    calls = tmp_path / "calls"
    path = stand_in(tmp_path / "bin", "kubectl", """
echo "$*" >> "$CALLS"
case "$*" in *create*) printf 'secret of '; tr '\\n' ' '; echo ;; *apply*) head -n 1 >> "$CALLS" ;; esac""")
    result = bash("jobset.sh", *TRAIN, MEMCALIB_JUDGE_API_KEY=KEY, CALLS=str(calls), PATH=path,
                  MEMCALIB_ANSWER_API_KEY="a=b", MEMCALIB_PIPELINE_API_KEY="", **JOBSET)
    assert result.returncode == 0, result.stderr
    assert KEY not in result.stdout + result.stderr
    lines = calls.read_text().splitlines()
    assert ("--namespace=default create secret generic w-keys --from-env-file=/dev/stdin "
            "--dry-run=client --output=yaml") in lines
    assert f"secret of MEMCALIB_ANSWER_API_KEY=a=b MEMCALIB_JUDGE_API_KEY={KEY} " in lines
    assert lines.count("--namespace=default apply -f -") == 2


@pytest.mark.parametrize("variables, srun", [
    ({}, ["srun", "--kill-on-bad-exit=0", "--wait=300"]),
    ({"SLURM_GPUS_ON_NODE": "4"},
     ["env", "JAX_LOCAL_DEVICE_IDS=0,1,2,3", "srun", "--kill-on-bad-exit=0", "--wait=300"]),
    ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2", "TASKS": "gpu"},
     ["srun", "--kill-on-bad-exit=0", "--wait=300", "--ntasks=8", "--ntasks-per-node=4", "--gpu-bind=none"])])
def test_a_slurm_job_starts_a_process_a_node_or_a_gpu(variables, srun):
    result = bash("slurm.sbatch", "--dry_run", "experiments.train_rl", *ODD, PYTHON="py",
                  SLURM_JOB_ID="7", **variables)
    command, comment = result.stdout.splitlines()
    assert shlex.split(command) == [*srun, "py", "-m", "experiments.train_rl", *ODD, "--multihost"]
    assert comment == "# on status 75: scontrol requeue 7"


@pytest.mark.parametrize("status, state, requeued", [
    (75, "RUNNING", True), (137, "RUNNING", True), (1, "RUNNING", True), (75, "CANCELLED", False),
    (0, "RUNNING", False), (2, "RUNNING", False)])
def test_a_slurm_job_goes_back_into_the_queue(tmp_path, status, state, requeued):
    calls = tmp_path / "calls"
    stand_in(tmp_path / "bin", "srun", f"exit {status}")
    path = stand_in(tmp_path / "bin", "scontrol", f"""
if [ "$1" = show ]; then echo "JobId=7 JobState={state}"; else echo "$*" >> "{calls}"; fi""")
    result = bash("slurm.sbatch", "experiments.train_rl", f"--run_dir={tmp_path}", SLURM_JOB_ID="7",
                  PATH=path)
    assert result.returncode == (75 if status in (1, 137) else status)
    assert calls.exists() == requeued
    if requeued:
        assert calls.read_text() == "requeue 7\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    scripts = sorted(path for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
    assert len(scripts) >= 7
    result = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
