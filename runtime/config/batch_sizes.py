"""The three batch keys: completes them for a number of ranks, and checks those that a restart may have.

Note [Global batch after a restart]: a run may continue on fewer ranks. A config with a micro-batch alone
then keeps the global batch of the first attempt by gradient accumulation. Where that is impossible, the run
says the new global batch. An accumulation that the config sets is never changed: the Hugging Face Trainer and
accelerate set it, and count micro-batches themselves. A first attempt that starts without all nodes has the
global batch of all of them, if its config is a file: in a dict, a script may have derived the micro-batch
from the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .axis_sizes import mesh_shape, pipeline_size
from .load import Loaded
from .schema import Config

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"
NO_SIZE = "auto: 1, no batch size is set"
_MOST_NAMED = 6
_FAR = 16
"""A fitting train_batch_size is not proposed if it is this many times the given one."""


def complete(
    loaded: Loaded, values: dict[str, Any], notes: dict[str, str], world: int, kept: int | None = None
) -> str:
    """Complete train = micro * accumulation * ranks, by DeepSpeed's rules; return what is wrong, or "".

    Args:
        world: ranks that train on different samples.
        kept: the global batch to keep. See Note [Global batch after a restart].
    """
    train = values[TRAIN]
    micro = values[MICRO]
    gas = values[GAS]
    if train is not None and (wrong := _mistake(train, micro, gas, world)):
        return f"{wrong}; {_remedy(train, micro, gas, world)}"
    if train is None and micro is None:
        if not loaded.auto & {TRAIN, MICRO, GAS}:
            return f"no batch size is set, give {TRAIN} or {MICRO}"
        micro = 1
        notes[MICRO] = NO_SIZE
    if train is None and gas is None and (steps := _find_accumulation(loaded.config, micro * world, kept)):
        gas = steps
        notes[GAS] = f"derived: keeps the {TRAIN} {kept} of other numbers of ranks"
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


def find_kept_batch(
    loaded: Loaded, values: dict[str, Any], sizes: Sequence[int], first_batch: int | None
) -> int | None:
    """Return the global batch that an attempt keeps, if it can; None where there is none to keep. See Note
    [Global batch after a restart].
    """
    if first_batch is not None or loaded.origin == "<dict>" or values[MICRO] is None:
        return first_batch
    try:
        return int(values[MICRO]) * mesh_shape(loaded.config, sizes[0]).samples
    except ValueError:  # `check_restarts` says why
        return None


def _find_accumulation(config: Config, one: int, kept: int | None) -> int:
    """Return the micro-batches of a step that make a global batch of `kept`; 0: none need to, or none do."""
    if kept is None or kept == one or kept % one or not config.managed_gradient_accumulation:
        return 0
    return 0 if _refused_accumulation(config, kept // one) else kept // one


def _refused_accumulation(config: Config, steps: int) -> str:
    """Return why a config cannot accumulate `steps` micro-batches; "" if it can."""
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
class RestartCheck:
    """Result of checking a config on every number of ranks that a run may restart with."""

    problem: str = ""
    """Reason why a restart would fail; empty if none would."""
    warnings: tuple[str, ...] = ()
    """Lines about a changed global batch."""


def check_restarts(
    loaded: Loaded,
    given: dict[str, Any],
    batch: int,
    world_size: int,
    sizes: Sequence[int],
    first_batch: int | None,
) -> RestartCheck:
    """Check a config on all numbers of ranks that the run may have.

    Args:
        given: the given batch sizes, which are right on `world_size` ranks.
        batch: the global batch there.
        sizes: all numbers of ranks, of which the first holds without a failure.
        first_batch: the global batch of the first attempt; None: this is the first.
    """
    wrong: dict[int, str] = {}
    samples: dict[int, int] = {}
    for size in sizes:
        try:
            samples[size] = mesh_shape(loaded.config, size).samples
        except ValueError as error:
            wrong[size] = str(error)
    if wrong:
        return RestartCheck(_would_fail(wrong, "or raise --min_nodes"))
    for size in set(sizes) - {world_size}:
        if reason := _find_problem(loaded, given, samples[size]):
            wrong[size] = reason
    changed = _changed(loaded, given, batch, world_size, sizes[0], samples, first_batch)
    if not wrong:
        return RestartCheck(warnings=changed)
    if loaded.origin == "<dict>" and None not in (given[TRAIN], given[MICRO], given[GAS]):
        # As the Trainer does it: a script that has all three has derived them from the number of ranks.
        unsure = f"{_would_fail(wrong, '')} unless the script derives these sizes from the number of ranks"
        return RestartCheck(warnings=changed if world_size != sizes[0] else (unsure,))
    return RestartCheck(_would_fail(wrong, _fitting(given, sorted(set(samples.values())))))


def _find_problem(loaded: Loaded, values: dict[str, Any], world: int) -> str:
    train = values[TRAIN]
    micro = values[MICRO]
    gas = values[GAS]
    if train is not None and (wrong := _mistake(train, micro, gas, world)):
        return wrong
    there = dict(values)
    return complete(loaded, there, {}, world) or _refused_accumulation(loaded.config, there[GAS])


def fits_no_world(loaded: Loaded) -> str:
    """Return why the batch sizes of a config are wrong on every number of ranks; "" if they are not."""
    config = loaded.config
    train = config.train_batch_size
    given = _factors(config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    one = math.prod(given.values())
    if train is None or train % one == 0:
        return ""
    product = " * ".join(f"{key} {value}" for key, value in given.items())
    product += f" = {one}" if len(given) > 1 else ""
    below = train // one * one
    right = f"{below} or {below + one}" if below else f"{one} or a multiple of it"
    return f"{TRAIN}: {train} is not a multiple of {product}, on any number of ranks; set it to {right}"


def _would_fail(wrong: dict[int, str], advice: str) -> str:
    sizes = sorted(wrong)
    more = ", ..." if len(sizes) > _MOST_NAMED else ""
    names = f"{', '.join(map(str, sizes[:_MOST_NAMED]))}{more} rank{'s' if sizes != [1] else ''}"
    text = f"a restart on {names}, which --min_nodes or --spares allows, would fail: {wrong[sizes[0]]}"
    return f"{text}; {advice}" if advice else text


def _fitting(values: dict[str, Any], worlds: Sequence[int]) -> str:
    """Return the advice for batch sizes that do not fit all numbers of ranks."""
    train = values[TRAIN]
    micro = values[MICRO]
    gas = values[GAS]
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
    loaded: Loaded,
    given: dict[str, Any],
    batch: int,
    world_size: int,
    full_size: int,
    samples: dict[int, int],
    first_batch: int | None,
) -> tuple[str, ...]:
    """Return a line with the old and the new global batch, if they differ."""
    micro = given[MICRO] or 1
    gas = given[GAS]
    here = samples[world_size]
    before = first_batch
    where = "in the first attempt"
    if before is None:
        is_fixed = given[TRAIN] is not None and (given[MICRO] is None or gas is None)
        before = batch if is_fixed else micro * (gas or 1) * samples[full_size]
        where = f"on all {full_size} with the same micro-batch"
    if batch == before:
        return ()
    steps, rest = divmod(before, micro * here)
    if gas is not None:
        why = f"{GAS} is set to {gas}"
    elif not loaded.config.managed_gradient_accumulation:
        why = "managed_gradient_accumulation is false"
    elif rest:
        why = f"{before} is not a multiple of {MICRO} {micro} * world size {here}"
    else:
        why = _refused_accumulation(loaded.config, steps) or "this is the first attempt, whose batch counts"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    return (f"the global batch is {batch} on {ranks}, and {before} {where}: {why}",)


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
