"""Take the flags of the `deepspeed` command: accept those without effect, name what replaces the others."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from zlaunch.cli.commands import Option, option
from zlaunch.errors import LaunchError
from zlaunch.launchers.found import read_job
from zlaunch.launchers.registry import LOCAL, NAMED, SSH
from zlaunch.plan.checks import parse_ranks
from zlaunch.plan.options import DEFAULT_HOSTFILE

# -- deepspeed flags --------------------------------------------------------------------------------


_DS = "DeepSpeed's names"
_DS_NO_EFFECT = ("--no_ssh_check", "--force_multi")
_DS_INSTEAD = {
    "--min_elastic_nodes": (True, "use --min_nodes N, with --max_restarts N"),
    "--max_elastic_nodes": (True, "use --num_nodes N"),
    "--elastic_training": (False, "use --max_restarts N, and --min_nodes N to restart without failed nodes"),
    "--launcher_args": (True, "use --ssh_config FILE for ssh, #SBATCH lines of the batch script for SLURM"),
    "--save_pid": (False, "use `zlaunch ps` and `zlaunch stop`"),
    "--autotuning": (True, "use `zlaunch tune`, which finds the fastest config"),
    "--venv_script": (True, "use --venv DIR, the virtual environment on the nodes"),
    "--detect_nvlink_pairs": (False, "use --include FILTER to choose the GPUs"),
}
"""Flag -> whether it has a value, and the answer."""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_ALIASES = {"pdsh": SSH}
_OTHER_LAUNCHERS = ("mpich", "mvapich", "impi")


def deepspeed_flags() -> list[Callable[..., Any]]:
    """Return hidden click options for these flags. Only `--log_level` has a value that the command gets."""
    found = [
        option(
            name, is_flag=True, hidden=True, expose_value=False, group=_DS, help="Accepted, has no effect."
        )
        for name in _DS_NO_EFFECT
    ]
    found += [
        option(name, group=_DS, **about) for name, about in answered(_DS_INSTEAD, "DeepSpeed's").items()
    ]
    found.append(
        option(
            "--config",
            hidden=True,
            expose_value=False,
            callback=_config,
            metavar="FILE",
            group=_DS,
            help="Not accepted here: it goes after the script.",
        )
    )
    level = option(
        "--log_level",
        type=click.Choice(_LEVELS),
        default="info",
        hidden=True,
        group=_DS,
        help="error and critical mean --quiet; the others have no effect.",
    )
    return [*found, level]


def answered(flags: Mapping[str, tuple[bool, str]], owner: str) -> dict[str, dict[str, Any]]:
    """Return click's settings for hidden flags that only get an answer, as a usage error.

    Each flag is mapped to whether it has a value, and to the answer.
    """
    return {
        name: {
            "hidden": True,
            "expose_value": False,
            "is_flag": None if takes_value else True,
            "callback": _refusing(f"{name} is {owner}: {answer}"),
            "metavar": "X" if takes_value else None,
            "help": f"Not accepted: {answer}.",
        }
        for name, (takes_value, answer) in flags.items()
    }


def _refusing(text: str) -> Callable[..., None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None and value is not False:  # 0 is a value, and equals False
            raise click.UsageError(text)

    return callback


def _config(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"--config belongs to the script: put it after the script, SCRIPT --config {value}"
        )


def take_launcher(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return our name of the launcher that --launcher names."""
    return None if value is None else launcher_name(value, "--launcher")


def launcher_name(value: str, flag: str) -> str:
    """Return our name of a launcher; DeepSpeed's default, pdsh, is ssh. Raises click.UsageError."""
    name = _ALIASES.get(value.lower(), value.lower())
    if name in _OTHER_LAUNCHERS:
        raise click.UsageError(f"{flag} {value}: use ssh, slurm or openmpi, which need no {value}")
    if name not in NAMED:
        *others, last = NAMED
        raise click.UsageError(f"{flag} {value}: expected {', '.join(others)} or {last}")
    return name


# -- torchrun flags ---------------------------------------------------------------------------------
#
# Translate the flags of torchrun and `accelerate launch` to zlaunch's options.
#
# Flags that zlaunch has no option for are ignored, or say what to use instead.


SAME = {
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "log_dir": "run_dir",
    "deepspeed_hostfile": "hostfile",
    "deepspeed_inclusion_filter": "include",
    "deepspeed_exclusion_filter": "exclude",
}
"""Flag -> zlaunch's name for it."""
_TR = "torchrun's and accelerate's names"
_HELP = {
    **{flag: f"Same as --{option}." for flag, option in SAME.items()},
    "nnodes": "Same as --num_nodes.",
    "nproc_per_node": "Same as --num_gpus; also gpu, cpu or auto.",
    "num_processes": "Workers on all nodes together.",
    "num_cpu_threads_per_process": "Set OMP_NUM_THREADS of the workers.  [default: a node's cores / workers]",
    "rdzv_endpoint": "Same as --master_addr HOST and --master_port PORT.",
    "rdzv_backend": "static, or c10d: nodes without --node_rank are numbered as they arrive.",
    "rdzv_id": "Name of the run, the same on every node; used without --node_rank.",
    "tee": "Same as --log_ranks all.",
    "redirects": "Accepted, has no effect: every rank has a log file.",
    "standalone": "Run on this machine only.",
    "mixed_precision": "Handed on to accelerate: no, fp16 or bf16.",
    "use_deepspeed": "Handed on to accelerate.",
    "deepspeed_config_file": "Handed on to accelerate, after zlaunch has checked it.",
    "gradient_accumulation_steps": "Handed on to accelerate.",
    "use_fsdp": "Handed on to accelerate: the script trains with torch's FSDP.",
    "role": "Name of the workers in ROLE_NAME and before their lines on the console.",
    "rdzv_conf": "timeout and join_timeout are --connect_timeout; other keys have no effect.",
    "local_addr": "Address of this machine for the rendezvous.",
    "local_ranks_filter": "Local ranks whose output the console shows, on every node: 0,2.",
    "virtual_local_rank": "Give each worker its GPU as device 0, and LOCAL_RANK 0.",
    "deepspeed_multinode_launcher": "pdsh, openmpi and slurm are --launcher; standard and nossh need "
    "--machine_rank on every node.",
}
"""Flag -> its help; those without one have no effect."""
_NO_EFFECT = "Accepted, has no effect."
_HANDED_ON = "Handed on to accelerate with --use_fsdp."
_FSDP = {
    "fsdp_version": "1",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": "100000000",
    "fsdp_auto_wrap_policy": None,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_backward_prefetch": None,
    "fsdp_state_dict_type": None,
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
}
"""Flag of accelerate's FSDP -> its default there. The variable is the name in capitals, see _variable."""
_NUMBERS = (
    *("num_machines", "machine_rank", "main_process_port", "num_processes"),
    "num_cpu_threads_per_process",
)
_TEXTS = (
    *("nnodes", "nproc_per_node", "rdzv_endpoint", "main_process_ip", "log_dir", "tee"),
    *("deepspeed_hostfile", "deepspeed_config_file", "gradient_accumulation_steps"),
    "deepspeed_inclusion_filter",
    "deepspeed_exclusion_filter",
    "deepspeed_multinode_launcher",
    "role",
    "rdzv_id",
    "rdzv_conf",
    "local_addr",
    "local_ranks_filter",
    *_FSDP,
)
_SWITCHES = (
    "standalone",
    "use_env",
    "use_deepspeed",
    "use_fsdp",
    "multi_gpu",
    "run_path",
    "same_network",
    "virtual_local_rank",
)
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "use_fsdp": "ACCELERATE_USE_FSDP",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
"""Flag -> the variable in which accelerate looks for it."""
_TR_NO_EFFECT = ("--monitor_interval", "--start_method")
"""With a value: workers are watched all the time, and are processes in any case."""
_IN_THE_CONFIG = "put it into the config file: --deepspeed_config_file"
_TIMEOUTS = ("timeout", "join_timeout")
"""Keys of --rdzv_conf for how long nodes wait for each other: of the static rendezvous, and of the others."""
_RENDEZVOUS_INSTEAD = {
    "keep_alive_interval": "--heartbeat SECONDS",
    "keep_alive_max_attempt": "--heartbeat SECONDS",
    "rank": "--node_rank R",
}
"""Key of --rdzv_conf -> zlaunch's option for it, which does not follow from its value."""
_BY_EACH_NODE = ("standard", "nossh")
"""Values of --deepspeed_multinode_launcher: the user starts the command on every node."""
_TR_INSTEAD = {
    "--numa_binding": (True, "use --bind node (the default) or --bind cores"),
    "--enable_cpu_affinity": (False, "use --bind cores"),
    "--shutdown_timeout": (True, "use --grace SECONDS"),
    "--signals_to_handle": (True, "SIGTERM, SIGINT and SIGHUP end a run; SIGUSR1 asks it to save and stop"),
    "--logs_specs": (True, "every rank's log is in the run's folder: --run_dir DIR"),
    "--event_log_handler": (True, "the events are in events.jsonl in the run's folder: --run_dir DIR"),
    "--duplicate_stdout_filters": (True, "every rank's log is in the run's folder: --run_dir DIR"),
    "--duplicate_stderr_filters": (True, "every rank's log is in the run's folder: --run_dir DIR"),
    "--config_file": (
        True,
        "zlaunch reads no file of accelerate's: say --num_processes, --num_machines and so on here, or use "
        "python -m zlaunch.compat.deepspeed accelerate launch",
    ),
    "--gpu_ids": (True, "use --include localhost:0,2-3"),
    "--dynamo_backend": (True, "set compile.enabled in the config"),
    "--cpu": (False, "hide the GPUs: CUDA_VISIBLE_DEVICES= zlaunch ..."),
    "--tpu": (False, "zlaunch runs on GPUs and CPUs"),
    "--main_training_function": (True, "leave it out: the script itself is started, as on all but TPUs"),
    "--use_megatron_lm": (False, "use the section `parallel` of the config"),
    "--zero_stage": (True, _IN_THE_CONFIG),
    "--offload_optimizer_device": (True, _IN_THE_CONFIG),
    "--offload_param_device": (True, _IN_THE_CONFIG),
    "--gradient_clipping": (True, _IN_THE_CONFIG),
    "--zero3_init_flag": (True, "use zlaunch.zero.Init in the script"),
    "--zero3_save_16bit_model": (True, _IN_THE_CONFIG),
}
"""Flag -> whether it has a value, and the answer."""
_UNSET = {"master_port": 0, "connect_timeout": 60.0}
"""Option -> its value where it is not given; None for the others."""
_NAMES = (*_NUMBERS, *_TEXTS, *_SWITCHES, "redirects", "rdzv_backend", "mixed_precision")
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", re.ASCII)


def _interface_of(host: str) -> str:
    """Return the interface of this machine that has this address, or an address of this name."""
    from zlaunch.system.network import interface_of

    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return ""
    if any(ipaddress.ip_address(address).is_loopback for address in found):
        return "lo"
    return next(filter(None, map(interface_of, found)), "")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Holds what decides on the meaning of a flag."""

    gpus: int
    cores: int
    knows_hosts: bool
    """A SLURM job or the hostfile that is looked for names the nodes."""
    step_nodes: int | None = None
    """Nodes of the step, where srun has started this on each of them."""
    interface_of: Callable[[str], str] = _interface_of
    """Returns the network interface that has an address; empty if none has."""


def torchrun_flags() -> list[click.Option]:
    """Return hidden click options for these flags; :func:`take_flags` translates their values."""

    def flag(name: str, *short: str, **more: Any) -> click.Option:
        metavar = None if more.get("is_flag") else more.pop("metavar", "X")
        text = _HELP.get(name, _HANDED_ON if name in _FSDP else _NO_EFFECT)
        return Option([f"--{name}", *short], hidden=True, metavar=metavar, help=text, group=_TR, **more)

    found = []
    for name in _NUMBERS:
        low = 0 if name in ("machine_rank", "main_process_port") else 1
        found.append(flag(name, type=click.IntRange(min=low), metavar="N"))
    found += [flag(name, *(("-t",) if name == "tee" else ())) for name in _TEXTS]
    found += [flag(name, is_flag=True) for name in _SWITCHES]
    found += [
        flag("redirects", "-r"),
        flag("rdzv_backend", callback=_backend),
        flag("mixed_precision", type=click.Choice(["no", "fp16", "bf16"])),
    ]
    found += [flag(name.lstrip("-"), expose_value=False) for name in _TR_NO_EFFECT]
    found += [
        Option([name], group=_TR, **about) for name, about in answered(_TR_INSTEAD, "not zlaunch's").items()
    ]
    return found


def _backend(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value not in (None, "c10d", "static"):
        raise click.UsageError(
            f"--rdzv_backend {value}: workers rendezvous only at node 0; use c10d or static"
        )
    return value


def surroundings() -> Surroundings:
    """Look at this machine and its environment."""
    from zlaunch.slurm.environment import SlurmError, read
    from zlaunch.system.machine import discover

    try:
        allocation = read(os.environ)
    except SlurmError:
        allocation = None  # said where the job is read for good
    return Surroundings(
        gpus=len(discover(os.environ).tokens),
        cores=len(os.sched_getaffinity(0)),
        knows_hosts=allocation is not None
        or os.path.isfile(DEFAULT_HOSTFILE)
        or read_job(os.environ) is not None,
        step_nodes=len(allocation.nodes) if allocation is not None and allocation.inside_step else None,
    )


def take_flags(given: dict[str, Any], around: Callable[[], Surroundings] = surroundings) -> dict[str, Any]:
    """Translate these flags: return what was given with their values in zlaunch's own options.

    ``notes`` in it is what the user should hear of that, ``configs`` is to be checked like arguments of the
    script, ``local_ranks`` are those to show on each node. Raises click.UsageError for what contradicts
    itself or is missing.
    """
    flags = {name: given.get(name) for name in _NAMES}
    out = {name: value for name, value in given.items() if name not in _NAMES}
    config = flags["deepspeed_config_file"]
    out["notes"] = []
    out["configs"] = () if config is None else ("--deepspeed_config", config)
    out["virtual_local_rank"] = bool(flags["virtual_local_rank"])
    teed = _streams("tee", flags["tee"])
    _streams("redirects", flags["redirects"])  # the logs have everything in any case
    out["arrival"] = None
    out["local_ranks"] = _local_ranks(flags["local_ranks_filter"], out["log_ranks"])
    if out["log_ranks"] is None and teed:
        out["log_ranks"] = "all"
    if all(value is None or value is False for value in flags.values()):  # 0 is a value, and equals False
        return out
    for flag, name in SAME.items():
        _take(out, name, flags[flag], f"--{flag} {flags[flag]}")
    _take(out, "num_nodes", _nodes(flags["nnodes"]), f"--nnodes {flags['nnodes']}")
    if flags["rdzv_endpoint"] is not None:
        said = f"--rdzv_endpoint {flags['rdzv_endpoint']}"
        host, port = _endpoint(said, flags["rdzv_endpoint"])
        _take(out, "master_addr", host, said)
        _take(out, "master_port", port, said)
    _take_rendezvous_conf(out, flags["rdzv_conf"])
    here = around()
    _take_launcher(out, flags["deepspeed_multinode_launcher"])
    by_arrival = flags["rdzv_backend"] == "c10d" and flags["rdzv_endpoint"] is not None
    arrives = _take_nodes(out, here, standalone=bool(flags["standalone"]), by_arrival=by_arrival)
    _take_local_address(out, here, flags["local_addr"])
    _take_workers(out, here, flags["nproc_per_node"], flags["num_processes"])
    out["no_local_rank"] = True  # neither torchrun nor accelerate passes it
    _take_variables(out, flags)
    if arrives:
        _take_arrival(out, here, given["rdzv_id"] or "")
    return out


def name_as_typed(error: LaunchError, given: Mapping[str, Any]) -> LaunchError:
    """Return an error about one of zlaunch's options with the name of the flag that the user has written."""
    text = str(error)
    for flag, name in {**SAME, "nproc_per_node": "num_gpus", "nnodes": "num_nodes"}.items():
        value = given.get(flag)
        if value is not None:
            text = text.replace(f"--{name} {value}: ", f"--{flag} {value}: ")
    return LaunchError(text)


def _take_arrival(out: dict[str, Any], here: Surroundings, run: str) -> None:
    """Say where the nodes meet that number themselves, and how long they wait for each other."""
    from zlaunch.launchers.arrival import DEFAULT_PORT, USUAL_LIMIT_S, Arrival

    host = out["master_addr"]
    port = out["master_port"] or DEFAULT_PORT
    is_own = bool(here.interface_of(host))
    out["arrival"] = Arrival(host, port, is_own, out["num_nodes"], out["num_gpus"], run)
    out["master_port"] = port
    if out["dry_run"]:
        out["notes"].append("this is the part of node 0: nodes are numbered as they arrive")
    if out["connect_timeout"] == _UNSET["connect_timeout"]:
        out["connect_timeout"] = USUAL_LIMIT_S


def _take(out: dict[str, Any], option: str, value: Any, said: str) -> None:
    unset = _UNSET.get(option)
    if value is None or value == unset:
        return
    if out[option] not in (unset, value):
        raise click.UsageError(f"{said} and --{option} {out[option]} contradict each other")
    out[option] = value


def _streams(name: str, value: str | None) -> bool:
    """Tell whether --tee or --redirects names any stream of any rank."""
    if value is not None and not _STREAMS.fullmatch(value):
        raise click.UsageError(f"--{name} {value}: write 0, 1, 2, 3 or 0:3,1:1")
    return value is not None and any(part.rpartition(":")[2] != "0" for part in value.split(","))


def _local_ranks(text: str | None, log_ranks: str | None) -> list[int] | None:
    """Read --local_ranks_filter. Raises click.UsageError and LaunchError."""
    if text is None:
        return None
    if log_ranks is not None:
        raise click.UsageError(
            f"--local_ranks_filter {text} and --log_ranks {log_ranks} contradict each other"
        )
    return parse_ranks("--local_ranks_filter", text, "0,2-3")


def _take_rendezvous_conf(out: dict[str, Any], text: str | None) -> None:
    """Take the timeouts of KEY=VALUE,... and say which keys have no effect."""
    found: dict[str, str] = {}
    if text:
        for part in text.split(","):
            key, _, value = (word.strip() for word in part.partition("="))
            if not key or not value:
                raise click.UsageError(f"--rdzv_conf {text}: expected KEY=VALUE,KEY=VALUE")
            found[key] = value
    for key in found.keys() & set(_TIMEOUTS):
        if not re.fullmatch(r"[1-9]\d{0,8}", found[key], re.ASCII):
            raise click.UsageError(f"--rdzv_conf {key}={found[key]}: expected a whole number of seconds")
    timeouts = [float(found[key]) for key in _TIMEOUTS if key in found]
    if timeouts:  # with both, torchrun's backend decides; the longer one is safe
        _take(out, "connect_timeout", max(timeouts), f"--rdzv_conf {text}")
    unused = [key for key in found if key not in _TIMEOUTS]
    if unused:
        instead = sorted({_RENDEZVOUS_INSTEAD[key] for key in unused if key in _RENDEZVOUS_INSTEAD})
        advice = f" (use {' and '.join(instead)})" if instead else ""
        out["notes"].append(f"--rdzv_conf: no effect: {', '.join(unused)}{advice}")


def _take_launcher(out: dict[str, Any], name: str | None) -> None:
    """Take accelerate's choice of how nodes are started, which counts for several of them alone."""
    if name is None or (out["num_nodes"] or 1) == 1 or name in _BY_EACH_NODE:
        return
    flag = "--deepspeed_multinode_launcher"
    _take(out, "launcher", launcher_name(name, flag), f"{flag} {name}")
    out["node_rank"] = out["master_addr"] = None  # the machine with this command starts the others


def _take_local_address(out: dict[str, Any], here: Surroundings, address: str | None) -> None:
    """Take the address of this machine: of its interface where others join, or of the rendezvous."""
    if address is None:
        return
    joins = out["node_rank"] is not None
    if not joins and (out["hostfile"] is not None or here.knows_hosts) and out["launcher"] != LOCAL:
        raise click.UsageError(
            f"--local_addr {address} is an address of this machine alone: use --iface NAME, the interface on "
            "every node (inside srun: --env NCCL_SOCKET_IFNAME=NAME --env GLOO_SOCKET_IFNAME=NAME)"
        )
    interface = here.interface_of(address)
    if not interface:
        raise click.UsageError(f"--local_addr {address}: this machine has no such address")
    if joins:
        _take(out, "iface", interface, f"--local_addr {address}, which is on {interface},")
    elif out["master_addr"] is None:
        out["master_addr"] = address


def _nodes(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text, re.ASCII)
    if match is None or int(match[1]) < 1:
        raise click.UsageError(f"--nnodes {text}: expected a number of nodes")
    if match[2] is not None and int(match[2]) != int(match[1]):
        raise click.UsageError(
            f"--nnodes {text}: the number of nodes is fixed. Give the number of nodes; with --hostfile, "
            f"--min_nodes {match[1]} --max_restarts N restarts without failed nodes"
        )
    return int(match[1])


def _endpoint(said: str, text: str) -> tuple[str, int]:
    """Read HOST:PORT, HOST alone, or [ADDRESS]:PORT."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^\[\]:]+))(?::(\d{1,5}))?", text, re.ASCII)
    if match is None:
        raise click.UsageError(f"{said}: expected HOST:PORT")
    host = match[1] or match[2]
    try:
        host.encode("idna")  # as every look-up of a host does
    except UnicodeError:
        raise click.UsageError(
            f"{said}: {host!r} is no host name: a part between dots is empty, too long or not a name"
        ) from None
    return host, int(match[3] or 0)


def _take_nodes(out: dict[str, Any], here: Surroundings, *, standalone: bool, by_arrival: bool) -> bool:
    """Take the nodes and the number of this one. Return whether nodes are numbered as they arrive, which
    `by_arrival` allows.
    """
    arrives = False
    nodes = out["num_nodes"]
    rank = out["node_rank"]
    hostfile = out["hostfile"]
    if standalone:
        if nodes not in (None, 1) or rank not in (None, 0) or hostfile is not None:
            raise click.UsageError(
                "--standalone means this machine only: remove the hostfile and the options for other nodes"
            )
        nodes = 1
        rank = None
        out["launcher"] = out["launcher"] or LOCAL
    alone = nodes == 1 or (nodes is None and not here.knows_hosts)
    if alone and rank == 0 and hostfile is None:
        rank = None  # this machine alone: one node is the default of torchrun and accelerate
    if rank is None and here.step_nodes is not None and out["launcher"] != LOCAL:
        if nodes not in (None, here.step_nodes):
            raise click.UsageError(f"--nnodes {nodes}: srun has started this on {here.step_nodes} node(s)")
        nodes = None
    elif rank is None and (nodes or 1) > 1 and hostfile is None and not here.knows_hosts and by_arrival:
        rank = 0
        arrives = True  # it is 0 until all have come
    elif rank is None and (nodes or 1) > 1 and hostfile is None and not here.knows_hosts:
        raise click.UsageError(
            f"--nnodes {nodes}: on every node add --rdzv_backend c10d --rdzv_endpoint HOST:PORT, or "
            "--node_rank R with --master_addr HOST, or list all hosts with --hostfile"
        )
    if rank is not None and hostfile is None:
        if nodes is None:
            raise click.UsageError(f"--node_rank {rank}: give the number of nodes with --nnodes N")
        if out["master_addr"] is None:
            raise click.UsageError(
                f"--node_rank {rank}: give node 0's address with --master_addr or --rdzv_endpoint HOST:PORT"
            )
    out["num_nodes"] = nodes
    out["node_rank"] = rank
    out["no_ssh"] = rank is not None
    return arrives


def _take_workers(out: dict[str, Any], here: Surroundings, each: str | None, total: int | None) -> None:
    nodes = out["num_nodes"]
    elsewhere = out["hostfile"] is not None or here.knows_hosts
    if each == "cpu" and here.gpus:
        raise click.UsageError(
            "--nproc_per_node cpu: this machine has GPUs: hide them, CUDA_VISIBLE_DEVICES= zlaunch ..."
        )
    if each == "gpu" and not here.gpus and not elsewhere:
        raise click.UsageError("--nproc_per_node gpu: this machine has no GPU; give a number of CPU workers")
    # as torchrun: a worker for each core, where there is no GPU
    if each == "cpu" or (each == "auto" and not here.gpus and not elsewhere):
        _take(out, "num_gpus", here.cores, f"--nproc_per_node {each}")
    elif each is not None and each not in ("gpu", "auto"):
        if not re.fullmatch(r"\d{1,6}", each, re.ASCII) or int(each) < 1:
            raise click.UsageError(f"--nproc_per_node {each}: expected a number, gpu, cpu or auto")
        _take(out, "num_gpus", int(each), f"--nproc_per_node {each}")
    if total is not None:
        if nodes is None and elsewhere:
            raise click.UsageError(
                "--num_processes counts the workers of all nodes: use --num_gpus N, the workers of each"
            )
        if total % (nodes or 1):
            raise click.UsageError(f"--num_processes {total}: cannot be divided evenly among {nodes} nodes")
        _take(out, "num_gpus", total // (nodes or 1), f"--num_processes {total}")
    if out["node_rank"] is not None and out["hostfile"] is None and out["num_gpus"] is None:
        out["num_gpus"] = here.gpus or 1  # as on the other nodes


def _take_variables(out: dict[str, Any], flags: dict[str, Any]) -> None:
    """Add to the workers' environment the variables that the other launcher would set."""
    found = {variable: flags[flag] for flag, variable in _VARIABLES.items() if flags[flag]}
    names = [f"--{flag}" for flag in _VARIABLES if flags[flag]]
    of_fsdp = [f"--{flag}" for flag in _FSDP if flags[flag] is not None]
    if flags["use_fsdp"]:
        found |= {_variable(flag): _setting(flags[flag], default) for flag, default in _FSDP.items()}
        names += of_fsdp
    elif of_fsdp:
        out["notes"].append(f"no effect without --use_fsdp: {', '.join(of_fsdp)}")
    pairs = {
        name: "true" if value is True else str(value) for name, value in found.items() if value is not None
    }
    if pairs:
        out["notes"].append(f"handed on to accelerate, where the script uses it: {', '.join(names)}")
    if flags["num_cpu_threads_per_process"] is not None:
        pairs["OMP_NUM_THREADS"] = str(flags["num_cpu_threads_per_process"])
    if flags["role"] is not None:
        if not flags["role"].strip() or not flags["role"].isprintable():
            raise click.UsageError("--role: expected a name")
        pairs["ROLE_NAME"] = flags["role"]
    out["env"] = (*(f"{name}={value}" for name, value in pairs.items()), *out["env"])


def _variable(flag: str) -> str:
    """Return the variable of a flag of accelerate's FSDP."""
    return flag.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")


def _setting(value: str | None, default: str | None) -> str | None:
    """Return the value of a flag of accelerate's FSDP as accelerate writes it: switches in small letters."""
    if value is None:
        return default
    return value.lower() if default in ("true", "false") else value
