"""The three batch keys: completes them for a number of ranks, and checks those that a restart may have.

Note [Global batch after a restart]: a run may continue on fewer ranks. A config with a micro-batch alone then
keeps the global batch by gradient accumulation. Where that is impossible, the run says the new global batch.
An accumulation that the config sets is never changed: the Hugging Face Trainer and accelerate set it, and
count micro-batches themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .load import Loaded
from .parallel import mesh_shape, pipeline_size
from .schema import Config

TRAIN, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
NO_SIZE = "auto: 1, no batch size is set"
_MOST_NAMED = 6
_FAR = 16
"""A fitting train_batch_size is not proposed if it is this many times the given one."""


def complete(loaded: Loaded, values: dict[str, Any], notes: dict[str, str], world: int, full: int) -> str:
    """Complete train = micro * accumulation * ranks, by DeepSpeed's rules; return what is wrong, or "".

    Args:
        world: ranks that train on different samples.
        full: their number without a failure. See Note [Global batch after a restart].
    """
    train, micro, gas = (values[key] for key in (TRAIN, MICRO, GAS))
    if train is not None and (wrong := _mistake(train, micro, gas, world)):
        return f"{wrong}; {_remedy(train, micro, gas, world)}"
    if train is None and micro is None:
        if not loaded.auto & {TRAIN, MICRO, GAS}:
            return f"no batch size is set, give {TRAIN} or {MICRO}"
        micro = 1
        notes[MICRO] = NO_SIZE
    if train is None and gas is None and (steps := _kept_by(loaded.config, micro, world, full)):
        gas = steps
        notes[GAS] = f"derived: keeps the {TRAIN} {micro * full} of world size {full}"
    if gas is None and (train is None or micro is None):
        gas = 1
        notes[GAS] = "derived: 1 unless set"
    if train is None:
        train = micro * gas * world
        notes[TRAIN] = f"derived: {MICRO} {micro} * {GAS} {gas} * world size {world}"
    elif micro is None:
        micro = train // (gas * world)
        notes[MICRO] = f"derived: {TRAIN} {train} / ({GAS} {gas} * world size {world})"
    elif gas is None:
        gas = train // (micro * world)
        notes[GAS] = f"derived: {TRAIN} {train} / ({MICRO} {micro} * world size {world})"
    values |= {TRAIN: train, MICRO: micro, GAS: gas}
    return ""


def find_full_samples(loaded: Loaded, world_size: int, sizes: Sequence[int]) -> int:
    """Return how many ranks train on different samples without a failure. Where the mesh does not fit them,
    which `check_restarts` refuses, it is the number on these ranks.
    """
    try:
        return mesh_shape(loaded.config, sizes[0]).samples
    except ValueError:
        return mesh_shape(loaded.config, world_size).samples


def _kept_by(config: Config, micro: int, world: int, full: int) -> int:
    """Return the micro-batches of a step that keep the global batch of `full` ranks; 0: none do."""
    steps, rest = divmod(micro * full, micro * world)
    allowed = config.managed_gradient_accumulation and not _refused_accumulation(config, steps)
    return steps if world != full and not rest and allowed else 0


def _refused_accumulation(config: Config, steps: int) -> str:
    """Return why a config cannot have so many micro-batches in a step; "" if it can."""
    if steps != 1 and config.zero_optimization.step_in_backward:
        return (
            f"zero_optimization.step_in_backward: {GAS} is {steps}, but each backward pass is a step: "
            f"set {GAS} to 1"
        )
    stages = pipeline_size(config)
    if stages > 1 and config.pipeline.schedule == "interleaved" and steps % stages:
        return (
            f"pipeline.schedule: interleaved needs {GAS} to be a multiple of the {stages} stages, got {steps}"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Restarts:
    """What a config does on the other numbers of ranks that a run may have."""

    problem: str = ""
    """Why an attempt there would fail."""
    warnings: tuple[str, ...] = ()
    """A changed global batch."""


def check_restarts(loaded: Loaded, values: dict[str, Any], world_size: int, sizes: Sequence[int]) -> Restarts:
    """Check a config on all numbers of ranks that the run may have, of which the first holds without a
    failure. `values` has the given batch sizes; on `world_size` ranks they are right.
    """
    wrong: dict[int, str] = {}
    samples: dict[int, int] = {}
    for size in sizes:
        try:
            samples[size] = mesh_shape(loaded.config, size).samples
        except ValueError as error:
            wrong[size] = str(error)
    if wrong:
        return Restarts(_would_fail(wrong, "or raise --min_nodes"))
    full = samples[sizes[0]]
    for size in set(sizes) - {world_size}:
        if reason := _find_problem(loaded, values, samples[size], full):
            wrong[size] = reason
    here = samples[world_size]
    if not wrong:
        return Restarts(warnings=_changed(loaded, values, world_size, sizes[0], here, full))
    if loaded.origin == "<dict>" and None not in (values[TRAIN], values[MICRO], values[GAS]):
        # As the Trainer does it: a script that has all three has derived them from the number of ranks.
        unsure = f"{_would_fail(wrong, '')} unless the script derives these sizes from the number of ranks"
        changed = _changed(loaded, values, world_size, sizes[0], here, full)
        return Restarts(warnings=changed if world_size != sizes[0] else (unsure,))
    return Restarts(_would_fail(wrong, _fitting(values, sorted(set(samples.values())))))


def _find_problem(loaded: Loaded, values: dict[str, Any], world: int, full: int) -> str:
    train, micro, gas = (values[key] for key in (TRAIN, MICRO, GAS))
    if train is not None and (wrong := _mistake(train, micro, gas, world)):
        return wrong
    there = dict(values)
    return complete(loaded, there, {}, world, full) or _refused_accumulation(loaded.config, there[GAS])


def _would_fail(wrong: dict[int, str], advice: str) -> str:
    sizes = sorted(wrong)
    more = ", ..." if len(sizes) > _MOST_NAMED else ""
    names = f"{', '.join(map(str, sizes[:_MOST_NAMED]))}{more} rank{'s' if sizes != [1] else ''}"
    text = f"a restart on {names}, which --min_nodes or --spares allows, would fail: {wrong[sizes[0]]}"
    return f"{text}; {advice}" if advice else text


def _fitting(values: dict[str, Any], worlds: Sequence[int]) -> str:
    """Return the advice for batch sizes that do not fit all numbers of ranks."""
    train, micro, gas = (values[key] for key in (TRAIN, MICRO, GAS))
    if train is None:
        return "or raise --min_nodes"
    if micro is not None and gas is not None:
        without = [f"leave out {TRAIN}"]
        if not any(_mistake(train, micro, None, world) for world in worlds):
            without = [f"leave out {GAS}"]
    else:
        one = math.lcm(*worlds) * (micro or 1) * (gas or 1)
        without = [f"set it to {-(-train // one) * one}"] if one <= _FAR * train else []
        without.append(f"leave it out and give {MICRO}" if micro is None else "leave it out")
    return f"{', '.join(without)}, or raise --min_nodes"


def _changed(
    loaded: Loaded, values: dict[str, Any], world_size: int, full_size: int, here: int, full: int
) -> tuple[str, ...]:
    """Return a line with the old and the new global batch, if they differ."""
    now, before = dict(values), dict(values)
    complete(loaded, now, {}, here, full)
    if complete(loaded, before, {}, full, full):  # all three are given, and right on these ranks alone
        before[TRAIN] = now[MICRO] * now[GAS] * full
    if now[TRAIN] == before[TRAIN]:
        return ()
    if values[GAS] is not None:
        why = f"{GAS} is set to {values[GAS]}"
    elif loaded.config.managed_gradient_accumulation:
        why = f"{before[TRAIN]} is not a multiple of {MICRO} {now[MICRO]} * world size {here}"
        if reason := _refused_accumulation(loaded.config, full // here):
            why = reason
    else:
        why = "managed_gradient_accumulation is false"
    return (
        f"the global batch is {now[TRAIN]} on {world_size} rank{'s' if world_size > 1 else ''}, "
        f"and {before[TRAIN]} on all {full_size}: {why}",
    )


def _mistake(train: int, micro: int | None, gas: int | None, world: int) -> str:
    """Return what is wrong with a given batch size; "" if nothing is."""
    given = _factors(micro, gas)
    one = world * (micro or 1) * (gas or 1)
    factors = " * ".join([*(f"{key} {value}" for key, value in given.items()), f"world size {world}"])
    product = f"{factors} = {one}" if given else factors
    if train % one == 0 and (train == one or len(given) < 2):
        return ""
    if len(given) == 2:
        return f"{TRAIN}: {train} is not {product}"
    wrong = "is less than" if train < one else "is not a multiple of"
    least = "one sample" if micro is None else "one micro-batch"
    return f"{TRAIN}: {train} {wrong} {product} (a step takes at least {least} on every rank)"


def _remedy(train: int, micro: int | None, gas: int | None, world: int) -> str:
    """Return what would be right instead of a wrong batch size."""
    given = _factors(micro, gas)
    one = world * (micro or 1) * (gas or 1)
    if len(given) == 2:
        return f"set it to {one}, or leave out one of the three keys"
    below = train // one * one
    right = f"{below} or {below + one}" if below else f"{one} or a multiple of it"
    other = " or ".join((*given, "the number of ranks"))
    instead = "" if given else f", or leave it out and give {MICRO}"
    return f"set it to {right}, or change {other}{instead}"


def _factors(micro: int | None, gas: int | None) -> dict[str, int]:
    return {key: value for key, value in ((MICRO, micro), (GAS, gas)) if value is not None}
