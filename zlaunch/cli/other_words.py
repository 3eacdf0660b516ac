"""Map the words of other launchers to zlaunch's, for the messages about unknown options and commands."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence

import click

_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *(
                "gpu",
                "gpus",
                "ngpus",
                "n_gpus",
                "gpus_per_node",
                "gpus_per_task",
                "devices",
                "n",
                "np",
                "nproc",
            ),
            *("ntasks", "ntasks_per_node", "tasks_per_node", "workers", "world_size"),
        ),
        ("num_gpus",),
    ),
    # a launch takes these, `submit` does not
    **dict.fromkeys(("nproc_per_node", "num_processes"), ("num_gpus",)),
    **dict.fromkeys(("node", "nodes", "n_nodes", "N", "num_hosts", "nnodes", "num_machines"), ("num_nodes",)),
    **dict.fromkeys(("host", "hosts", "machinefile", "host_file"), ("hostfile",)),
    **dict.fromkeys(("nodelist", "w"), ("include",)),
    "x": ("exclude",),
    "port": ("master_port",),
    **dict.fromkeys(("output", "log", "logs", "o"), ("run_dir", "output")),
    **dict.fromkeys(("background", "daemon", "d"), ("detach",)),
    **dict.fromkeys(("test", "check", "plan", "dryrun"), ("dry_run",)),
    **dict.fromkeys(("retries", "restarts", "max_retries"), ("max_restarts",)),
    **dict.fromkeys(("ip", "addr", "address"), ("master_addr",)),
    **dict.fromkeys(("export", "set_env", "envs"), ("env",)),
    **dict.fromkeys(("chdir", "cwd", "wdir", "workspace"), ("workdir",)),
    **dict.fromkeys(("model", "size", "model_size"), ("params",)),
    **dict.fromkeys(("memory", "gpu_memory", "vram"), ("gpu_mem",)),
}
"""Unknown option -> zlaunch's options with that meaning; a command's message names the first it has."""
_OF_THE_SCRIPT = (
    *("resume", "resume_from_checkpoint", "deepspeed", "deepspeed_config", "zero", "lr", "learning_rate"),
    *("epochs", "num_epochs", "num_train_epochs", "batch_size", "train_batch_size", "seed", "local_rank"),
    *(
        "per_device_train_batch_size",
        "model_name_or_path",
        "dataset",
        "output_dir",
        "num_workers",
        "bf16",
        "fp16",
    ),
)
"""Options that training scripts take, not launchers."""
_OF_SLURM = (
    "partition",
    "p",
    "account",
    "A",
    "time",
    "t",
    "qos",
    "array",
    "mem",
    "cpus_per_task",
    "job_name",
)
_PROGRAMS = (
    *("python", "python3", "torchrun", "deepspeed", "accelerate", "srun", "mpirun", "mpiexec", "horovodrun"),
    *("torchx", "sudo", "nohup", "bash", "sh", "env", "time"),
)
"""Programs that users write in front of the script."""
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Launchers that users start as `python -m MODULE`."""
_RUN_AGAIN = (
    "start the same script again, `zlaunch SCRIPT [ARGS]`, and let it call engine.load_checkpoint(DIR)"
)
_COMMANDS = {
    "train": "write `zlaunch SCRIPT [ARGS]`, such as `zlaunch train.py`",
    "resume": f"{_RUN_AGAIN} to resume from the newest checkpoint",
    "restart": f"{_RUN_AGAIN}; --max_restarts N restarts after a failure",
    "version": "write `zlaunch --version`",
    "squeue": "write `zlaunch queue`, or `zlaunch slurm queue` for your SLURM jobs",
    "sbatch": "write `zlaunch submit SCRIPT`, or `zlaunch slurm submit FILE.sbatch` for a batch file",
    "check": "write `zlaunch config check FILE` for a config, or `zlaunch doctor` for the machines",
    "validate": "write `zlaunch config check FILE`",
    "clean": "write `zlaunch ps --clean`, which removes what ended runs have left",
    "rm": "write `zlaunch ps --clean`, which removes what ended runs have left",
    "history": "write `zlaunch ps --all`",
}
"""Word in a command's place -> what to do."""
_SAME_ARGUMENTS = {
    "status": "ps",
    "list": "ps",
    "ls": "ps",
    "jobs": "queue",
    "kill": "stop",
    "scancel": "cancel",
    "export": "checkpoint export",
    "convert": "checkpoint export",
    "info": "doctor",
    "tail": "logs -f",
    "monitor": "watch",
    "top": "watch",
    "launch": "",
    "exec": "",
    "start": "",
}
"""Word in a command's place -> zlaunch's command that takes the same arguments."""
_LEAST_LIKENESS = 0.75
_LIKENESS_OF_WORDS = 0.8
"""Higher, because words are short: "last" is no slip for "list"."""


def spelled_out(words: Sequence[str], error: click.NoSuchOption) -> list[str] | None:
    """Return a command line with the full name of the option that these words abbreviate; None where several
    options begin so, or where :func:`unknown_option` has a better answer.
    """
    name = _bare(error.option_name)
    if error.ctx is None or name in _OPTIONS or name in _OF_THE_SCRIPT or name in _OF_SLURM:
        return None
    found = {
        each.name: long
        for each in error.ctx.command.get_params(error.ctx)
        for long in each.opts
        if long.startswith("--") and _bare(long).startswith(name)
    }
    at = next((i for i, word in enumerate(words) if _bare(word.partition("=")[0]) == name), None)
    if len(found) != 1 or at is None or not words[at].startswith("--"):
        return None
    _, sign, value = words[at].partition("=")
    return [*words[:at], f"{next(iter(found.values()))}{sign}{value}", *words[at + 1 :]]


_OF_SBATCH = frozenset(
    {"account", "array", "constraint", "cpus_per_gpu", "cpus_per_task", "dependency", "exclusive", "mem"}
    | {"mem_per_cpu", "mem_per_gpu", "mail_type", "mail_user", "nice", "nodelist", "output", "partition"}
    | {"gres", "licenses", "qos", "reservation", "signal", "begin", "comment", "deadline", "error", "exclude"}
    | {"open_mode", "prefer", "switches", "tmp", "gpu_bind", "ntasks_per_node", "hint", "chdir", "export"}
)
"""Options of sbatch that `zlaunch submit` does not have."""


def _bare(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _is_of_a_launch(name: str) -> bool:
    """Tell whether `zlaunch SCRIPT` has this option."""
    from dataclasses import fields

    from zlaunch.plan.options import Launch

    return any(field.name == name for field in fields(Launch))


def unknown_option(error: click.NoSuchOption) -> str:
    """Return the message about an unknown option. It names a near option only where it is really near."""
    text = f"No such option {error.option_name}"
    if error.ctx is None:
        return f"{text}."
    known = [name for each in error.ctx.command.get_params(error.ctx) for name in each.opts]
    bare = error.option_name.lstrip("-")
    for ours in _OPTIONS.get(bare, ()):
        if f"--{ours}" in known:
            return f"{text}: use --{ours}."
    if bare in ("dry_run", "dry-run") and error.ctx.command_path == "zlaunch slurm submit":
        return f"{text}: `zlaunch slurm script` prints the batch file and submits nothing."
    if bare == "after" and "--sbatch" in known:
        return f'{text}: use --sbatch "--dependency=afterok:JOB"'
    if "--sbatch" in known and bare.replace("-", "_") in _OF_SBATCH:
        return f'{text}: in SLURM, use --sbatch "--{bare.replace("_", "-")}=VALUE"'
    if "--zlaunch_args" in known and _is_of_a_launch(bare.replace("-", "_")):
        return f'{text}: use --zlaunch_args "--{bare.replace("-", "_")} VALUE"'
    if "--num_gpus" in known and bare in _OF_THE_SCRIPT:
        return f"{text}. An option of the script goes after the script: SCRIPT {error.option_name}"
    if near := difflib.get_close_matches(error.option_name, known, n=1, cutoff=_LEAST_LIKENESS):
        return f"{text}. Did you mean {near[0]}?"
    # click reads -dtype as -d -t -y -p -e, and complains of the first.
    begin_so = [name for name in known if name.startswith(f"--{bare}")] if len(bare) == 1 else []
    if len(begin_so) == 1:
        return f"{text}. Did you mean {begin_so[0]}?"
    if "--detach" in known and bare in _OF_SLURM:
        dashed = error.option_name.replace("_", "-")
        return f"{text}. Options of sbatch go into a batch file: zlaunch slurm script {dashed} ... SCRIPT"
    if "--help_all" in known:
        return f"{text}. `zlaunch --help-all` lists all options."
    return f"{text}. `{error.ctx.command_path} -h` lists the options."


def meant_command(words: Sequence[str], known: Iterable[str]) -> str | None:
    """Return what to write instead of these words, where the first is a command or program of others, or
    nearly one. ``known`` are zlaunch's own commands, which it must not be nearer to.
    """
    name = _near_word(words[0], known)
    rest = list(words[1:])
    if name in _COMMANDS:
        return _COMMANDS[name]
    if name in _SAME_ARGUMENTS:
        command = _SAME_ARGUMENTS[name].split()
        if name == "kill":
            rest = ["--signal", "KILL"] * ("-9" in rest) + [word for word in rest if word != "-9"] or ["RUN"]
        return f"write `{_line(command, rest if command else rest or ['SCRIPT'])}`"
    if not _is_program(name):
        return None
    left = _without_programs(words)
    if left is None:
        return f"save the code to a file, because every worker runs it; {name} is not needed"
    return f"zlaunch starts the workers itself, so leave it out: `{_line([], left or ['SCRIPT'])}`"


def _near_word(word: str, known: Iterable[str]) -> str:
    """Return the word of another launcher that a mistyped one is nearest to; else the word itself."""
    others = {*_COMMANDS, *_SAME_ARGUMENTS}
    if word in others or not word.isalpha():
        return word
    near = difflib.get_close_matches(word, [*known, *others], n=1, cutoff=_LIKENESS_OF_WORDS)
    return near[0] if near and near[0] in others else word


def _without_programs(words: Sequence[str]) -> list[str] | None:
    """Remove the programs in front of the script, such as `sudo mpirun -np 2 python`. Return None for code
    (`python -c`).
    """
    program = words[0].rpartition("/")[2]
    rest = list(words[1:])
    if program == "accelerate" and rest[:1] == ["launch"]:
        rest = rest[1:]
    if program.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[1:]
        if rest[:1] == ["-c"]:
            return None
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _LAUNCHER_MODULES:
            rest = rest[2:]
    inner = next((at for at, word in enumerate(rest) if _is_program(word)), None)
    if inner is None:
        return rest
    left = _without_programs(rest[inner:])
    count = next((rest[at + 1] for at in range(inner - 1) if rest[at] in ("-n", "-np")), None)
    return left if left is None or count is None else ["--num_gpus", count, *left]


def _is_program(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name in _PROGRAMS or name.startswith("python3.")


def unknown_command(name: str, group: str, known: Iterable[str]) -> str:
    """Return the message about a word that is no command of a group."""
    names = list(known)
    text = f"No such command {name!r}."
    if near := difflib.get_close_matches(name, names, n=1):
        return f"{text} Did you mean `{group} {near[0]}`?"
    *others, last = (f"`{group} {each}`" for each in names)
    return f"{text} Use {' or '.join(filter(None, (', '.join(others), last)))}."


def _line(command: Sequence[str], rest: Sequence[str]) -> str:
    return shlex.join(["zlaunch", *command, *rest])
