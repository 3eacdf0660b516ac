"""Settling what a config leaves open: "auto" values and the three batch keys."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..mesh import MeshShape
from ..optimizer_specs import IN_CONFIG
from ..world_sizes import FirstBatch, find_first_batch
from .axis_sizes import mesh_shape
from .batch_sizes import GAS, MICRO, NO_SIZE, TRAIN, check_restarts, complete, find_kept_batch
from .load import ConfigError, Loaded, load
from .optimizers import SCHEDULER_PARAMS
from .schema import TRACKERS, Config, without_secrets


@dataclass(frozen=True)
class Effective:
    """The config that a run really uses, and where each value comes from."""

    config: Config
    """Resolved: the three batch keys are ints."""
    sources: dict[str, str]
    """Dotted path to the file's name, "default", "auto: why" or "derived: how"."""
    loaded: Loaded
    """What it was made from."""
    batch_warnings: tuple[str, ...] = ()
    """Warnings about the global batch after a restart on fewer ranks, one line each."""

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain JSON values."""
        return self.config.model_dump(mode="json")

    def digest(self) -> str:
        """Return a hash of the values; equal configs have equal digests, whatever their sources. Of trackers,
        which rank 0 alone has, it holds only whether they are switched on: a name may have a time in it.
        """
        values = self.to_dict()
        for name in TRACKERS:
            values[name] = values[name]["enabled"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write values and sources as JSON, without secrets; a reader never sees half a file."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(
                    {"config": without_secrets(self.to_dict()), "sources": self.sources}, file, indent=2
                )
                file.write("\n")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def override(self, section: Literal["optimizer", "scheduler"], by: str) -> list[str]:
        """Note that the script passes an object instead of this section; return a warning if it is set."""
        given = getattr(self.config, section)
        if given is None or given.type is None:
            return []
        for path in self.sources:
            if path.startswith(f"{section}."):
                self.sources[path] = f"no effect: the script passes {by}"
        argument = "optimizer" if section == "optimizer" else "lr_scheduler"
        return [
            f"{self.loaded.origin}: {section} {given.type} has no effect, because the script passes {by}: "
            f"remove the section, or do not pass {argument}= to initialize"
        ]

    def resolved_auto(self) -> list[str]:
        """Return a line with the value that each "auto" has become, or none."""
        values = dict(_leaves(self.to_dict()))
        found = [
            f"{path} {json.dumps(values[path])}" if path in values else f"{path} left out"
            for path in sorted(self.loaded.auto)
        ]
        return [f'{self.loaded.origin}: "auto" is set to {", ".join(found)}'] if found else []

    def guesses(self) -> list[str]:
        """Return a line for each "auto" whose value changes what is trained and that nothing has given."""
        if self.sources[MICRO] != NO_SIZE:
            return []
        return [f'{self.loaded.origin}: {MICRO}: "auto" became 1, because no batch size is set; set a number']

    def changed_defaults(self) -> list[str]:
        """Return a line for each key in use that is not given and whose default DeepSpeed has changed."""
        values = dict(_leaves(self.to_dict()))
        unused = [] if self.config.bf16.enabled else ["bf16.check_grad_overflow"]
        for section in ("offload_optimizer", "offload_param"):
            given = getattr(self.config.zero_optimization, section)
            if given is None or given.device == "none":
                unused.append(f"zero_optimization.{section}.pin_memory")
        return [
            f"{path} is not set: uses {json.dumps(values[path])}, the default {CHANGED[path]}"
            for path in CHANGED
            if path in values and self.sources[path] == f"default {CHANGED[path]}" and path not in unused
        ]

    def table(self) -> list[tuple[str, str, str]]:
        """Return key, value and source of every value, without secrets."""
        values = dict(_leaves(without_secrets(self.to_dict())))
        return [(path, json.dumps(value), self.sources[path]) for path, value in values.items()]


def resolve(
    loaded: Loaded,
    *,
    world_size: int,
    world_sizes: Sequence[int] = (),
    first_batches: Sequence[FirstBatch] = (),
    hidden_size: int | None = None,
    hidden_size_from: str = "",
    expert_size: int = 1,
    expert_size_from: str = "the model's experts decide",
    default_lr: float | None = None,
) -> Effective:
    """Fill in "auto" and the batch keys for a run on `world_size` ranks.

    `expert_size` is taken for "auto" on these ranks; others may have another one.
    `world_sizes` has all numbers of ranks that the run may have after failures, the one without a failure
    first. `first_batches` has the engines of the run's first attempt that this process has not made yet;
    empty: this is the first. Raises ConfigError if the config fails on any of these numbers of ranks. See
    Note [Global batch after a restart] in `batch_sizes.py`.
    """
    for name, number in (("world_size", world_size), ("hidden_size", hidden_size)):
        if number is not None and number < 1:
            raise ConfigError([f"{name}: {number} is not allowed, expected 1 or more"])
    values = loaded.config.model_dump(mode="json")
    notes: dict[str, str] = dict(loaded.dropped)
    batch_warnings, problems = _batch(loaded, values, notes, world_size, world_sizes, first_batches)
    problems += _params(loaded, values, notes, default_lr)
    _sizes(loaded, values, notes, hidden_size, hidden_size_from)
    if leaves_expert_size_open(loaded):
        values["parallel"]["expert"] = expert_size
        notes["parallel.expert"] = f"auto: {expert_size_from}"
    if problems:
        raise ConfigError([f"{loaded.origin}: {problem}" for problem in problems])
    for path in loaded.auto:
        notes.setdefault(path, "auto: default")
    config = Config.model_validate(values)
    sources = {path: _source(path, loaded, notes) for path, _ in _leaves(config.model_dump(mode="json"))}
    return Effective(config, sources, loaded, tuple(f"{loaded.origin}: {line}" for line in batch_warnings))


_MUST_BE_FILLED = {
    "gradient_clipping": "a number, the maximum gradient norm (0 is off)",
    "zero_optimization.stage": "0, 1, 2 or 3",
}


def open_values(loaded: Loaded) -> dict[str, str]:
    """Return what to write for each "auto" of which there is no right value but the script's own, by key."""
    return {path: value for path, value in _MUST_BE_FILLED.items() if path in loaded.auto}


def open_lines(loaded: Loaded) -> list[str]:
    """Return a line for each of the :func:`open_values`."""
    return [
        f'{loaded.origin}: {path}: only the Hugging Face Trainer and accelerate fill in "auto"; '
        f"without them, set {value}"
        for path, value in open_values(loaded).items()
    ]


def refuse_open(loaded: Loaded) -> None:
    """Check that no "auto" is left that only the script can fill in.

    For when training begins: the Trainer and accelerate have filled in theirs by then. Raises ConfigError.
    """
    if problems := open_lines(loaded):
        raise ConfigError(problems)


def check_batch(loaded: Loaded, world_sizes: Sequence[int]) -> None:
    """Check the mesh and a given train_batch_size on all numbers of ranks that a run may have, the one
    without a failure first. Raises ConfigError.
    """
    values = loaded.config.model_dump(mode="json", include={TRAIN, MICRO, GAS})
    if values[TRAIN] is None:  # a script may fill in what is missing
        values[MICRO] = values[MICRO] or 1
    _, problems = _batch(loaded, values, {}, world_sizes[0], world_sizes)
    if problems:
        raise ConfigError([f"{loaded.origin}: {problem}" for problem in problems])


def _batch(
    loaded: Loaded,
    values: dict[str, Any],
    notes: dict[str, str],
    world_size: int,
    sizes: Sequence[int],
    first_batches: Sequence[FirstBatch] = (),
) -> tuple[tuple[str, ...], list[str]]:
    """Complete the batch keys on these ranks and check them on the others that the run may have; return
    warnings and problems.
    """
    if world_size not in sizes:  # the launcher did not count these ranks: a script started them
        sizes = (world_size,)
        first_batches = ()
    given = dict(values)
    first = find_first_batch(first_batches, given[MICRO])
    # on as many ranks, the config gives what it gave then
    first_batch = None if first is None or first.ranks == world_size else first.size
    here = find_mesh(loaded, world_size).samples
    kept = find_kept_batch(loaded, given, sizes, first_batch)
    if problem := complete(loaded, values, notes, here, kept):
        return (), [problem]
    restarts = check_restarts(loaded, given, values[TRAIN], world_size, sizes, first_batch)
    return restarts.warnings, [restarts.problem] if restarts.problem else []


def leaves_expert_size_open(loaded: Loaded) -> bool:
    """Tell whether the model decides how many ranks have different experts."""
    is_enabled = loaded.config.expert_parallel.enabled
    autoep = is_enabled and "expert_parallel.autoep_size" in loaded.auto
    return autoep or "parallel.expert" in loaded.auto


def with_expert_size(loaded: Loaded, size: int) -> Loaded:
    """Return the config with an expert-parallel size in place of "auto". Raises ConfigError where other keys
    do not go with the size.
    """
    parallel = {**(loaded.raw.get("parallel") or {}), "expert": size}
    try:
        found = load({**loaded.raw, "parallel": parallel})
    except ConfigError as error:
        raise ConfigError([line.replace("<dict>", loaded.origin, 1) for line in error.problems]) from None
    return replace(found, origin=loaded.origin)


def find_mesh(loaded: Loaded, world_size: int) -> MeshShape:
    """Return the mesh of a config on so many ranks. Raises ConfigError with the sizes that would do."""
    try:
        return mesh_shape(loaded.config, world_size)
    except ValueError as error:
        raise ConfigError([f"{loaded.origin}: {error}"]) from None


def _leaves(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(item, dict) and item:
            yield from _leaves(item, here)
        else:
            yield here, item


CHANGED = {
    "gradient_clipping": "since DeepSpeed 0.19.3 (June 2026, #8068); before, gradients were not clipped",
    "bf16.check_grad_overflow": "of DeepSpeed since June 2026 (#8035); before, false",
    "zero_optimization.offload_optimizer.pin_memory": "of DeepSpeed since August 2026 (#8207); before, false",
    "zero_optimization.offload_param.pin_memory": "of DeepSpeed since August 2026 (#8207); before, false",
}
"""Keys whose defaults DeepSpeed has changed, so that an old config without them means something else now."""


def _source(path: str, loaded: Loaded, notes: dict[str, str]) -> str:
    if path in notes:
        return notes[path]
    default = f"default {CHANGED[path]}" if path in CHANGED else "default"
    # Inside values that are not checked key by key, the outer key is the one that is listed.
    while path:
        if path in loaded.given:
            return loaded.origin
        path = path.rpartition(".")[0]
    return default


def _sizes(
    loaded: Loaded, values: dict[str, Any], notes: dict[str, str], hidden: int | None, hidden_from: str
) -> None:
    """Size the ZeRO buckets by the model's width."""
    width = hidden or 0
    name = f"hidden_size {hidden}" + (f" from {hidden_from}" if hidden_from else "")
    rules = {
        "reduce_bucket_size": (width * width, f"{name}, squared"),
        "stage3_prefetch_bucket_size": (int(0.9 * width * width), f"0.9 * the square of {name}"),
        "stage3_param_persistence_threshold": (10 * width, f"10 * {name}"),
    }
    for key, (size, why) in rules.items():
        path = f"zero_optimization.{key}"
        if path in loaded.auto and hidden is None:
            notes[path] = "auto: default, the model's hidden_size is unknown"
        elif path in loaded.auto:
            values["zero_optimization"][key] = size
            notes[path] = f"auto: {why}"


def _params(
    loaded: Loaded, values: dict[str, Any], notes: dict[str, str], default_lr: float | None
) -> list[str]:
    """Settle "auto" in the arguments of the optimizer and the scheduler."""
    problems = []
    opened = {part: sorted(_auto_params(loaded, part)) for part in ("optimizer", "scheduler")}
    optimizer = values["optimizer"]
    scheduler = values["scheduler"]
    defaults = IN_CONFIG[optimizer["type"]].defaults if optimizer else {"lr": 1e-3}
    if optimizer:
        for name in opened["optimizer"]:
            path = f"optimizer.params.{name}"
            if name == "lr" and default_lr is not None:
                optimizer["params"][name] = default_lr
                notes[path] = "auto: the script's learning rate"
            elif name in defaults:
                optimizer["params"][name] = defaults[name]
                notes[path] = f"auto: torch's default for {optimizer['type']}"
    lr = (optimizer or {"params": {}})["params"].get(
        "lr", defaults["lr"] if default_lr is None else default_lr
    )
    if scheduler:
        for name in opened["scheduler"]:
            path = f"scheduler.params.{name}"
            if name == "warmup_max_lr":
                scheduler["params"][name] = lr
                notes[path] = "auto: the optimizer's learning rate"
                continue
            model = SCHEDULER_PARAMS.get(scheduler["type"])
            if model is None:
                continue
            if name in model.required:
                problems.append(f'{path}: "auto" cannot be resolved here, set a value')
            elif (default := model.model_fields[name].default) is not None:
                scheduler["params"][name] = default
                notes[path] = "auto: default"
    return problems


def _auto_params(loaded: Loaded, part: str) -> Iterator[str]:
    prefix = f"{part}.params."
    return (path.removeprefix(prefix) for path in loaded.auto if path.startswith(prefix))
