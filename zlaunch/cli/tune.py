"""`zlaunch tune`: find the config with which a script trains fastest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option
from zlaunch.errors import LaunchError

if TYPE_CHECKING:
    from zlaunch.tuning.search import Space, Trial, TuningResults
    from zlaunch.tuning.trial import TrialLimits, TunedCommand
    from zlaunch.tuning.variants import BatchSizes, Variant

_OWN = ("steps", "warmup", "time_limit", "dir")
_SETTINGS = {**SETTINGS, "ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(cls=Command, context_settings=_SETTINGS, short_help="Find the fastest config with short runs.")
@count_option("--steps", default=10, show_default=True, help="Timed steps per run.")
@count_option("--warmup", low=0, default=3, show_default=True, help="Steps before the timed ones.")
@click.option(
    "--time_limit",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of a run.",
)
@click.option("--dir", "folder", default="tune", show_default=True, metavar="DIR", help="Folder for results.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCH OPTIONS] SCRIPT [ARGS]...")
def tune(steps: int, warmup: int, time_limit: float, folder: str, command: tuple[str, ...]) -> int:
    """Try stages, offload, micro-batches and buckets in short runs, and write the fastest config.

    It starts `zlaunch [LAUNCH OPTIONS] SCRIPT [ARGS]...` once per trial and stops it after a few steps.
    SCRIPT must take its config as --config, --deepspeed_config or --deepspeed FILE. All trials have the same
    global batch size. Ctrl-C keeps the best config so far. The same command resumes the search.
    """
    from zlaunch.tuning.search import TuningResults
    from zlaunch.tuning.trial import TrialLimits

    tuned = _tuned_command(command)
    from zlaunch.runtime.config import ConfigError, load

    try:
        raw = load(tuned.path).raw
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    about = {"command": list(command), "config": raw, "steps": steps, "warmup": warmup}
    results = TuningResults(Path(folder), json.loads(json.dumps(about)))
    tuning = _Tuning(tuned, raw, results, TrialLimits(warmup, steps, time_limit))
    try:
        tuning.run()
    except KeyboardInterrupt:
        click.echo("\nzlaunch tune: ended; the same command goes on", err=True)
        tuning.show()
        return 130
    tuning.show()
    return 0 if tuning.best is not None else 1


def _tuned_command(given: Sequence[str]) -> TunedCommand:
    """Split a command line into the launch's options and the script's. Raises click.UsageError."""
    from zlaunch.cli.run import run
    from zlaunch.plan.checks import config_arguments
    from zlaunch.tuning.trial import TunedCommand

    try:
        launch = run.make_context("zlaunch", list(given))
    except click.NoSuchOption as error:
        if error.option_name.lstrip("-").replace("-", "_") in _OWN:
            raise click.UsageError(
                f"{error.option_name} is an option of tune: put it before the options of the launch"
            ) from None
        raise
    command = tuple(launch.params["command"])
    if not command:
        raise click.UsageError("no script given; see zlaunch tune --help")
    for name in ("run_dir", "dry_run", "max_restarts"):
        if launch.params[name]:
            raise click.UsageError(f"--{name} cannot be used with tune")
    configs = [value for _, value, _ in config_arguments(command[1:])]
    if len(set(configs)) != 1:
        raise click.UsageError(
            f"{command[0]} needs one config to tune: --config, --deepspeed_config or --deepspeed "
            "FILE, a name that ends in .json, .yaml or .yml"
        )
    folder = launch.params["workdir"] or ""
    path = os.path.join(folder, configs[0])
    if not os.path.isfile(path):
        raise click.UsageError(f"{path}: no such config")
    options = tuple(given[: len(given) - len(command)])
    return TunedCommand(options, command, configs[0], path)


class _Tuning:
    """Carries out the runs and says what they show."""

    def __init__(
        self, tuned: TunedCommand, raw: dict[str, Any], results: TuningResults, limits: TrialLimits
    ) -> None:
        self.tuned = tuned
        self.raw = raw
        self.results = results
        self.limits = limits
        self.batch: BatchSizes | None = None
        self.best: Trial | None = None

    def run(self) -> None:
        """Try what there is to try."""
        from zlaunch.tuning.search import search
        from zlaunch.tuning.variants import Variant

        first = self.measure(Variant())  # it shows the batch sizes, on which the rest depends
        if (why := first.without_a_step) is not None:
            raise LaunchError(
                f"{self.tuned.command[0]} made no step ({why}): train with an engine from "
                'zlaunch.initialize, and save under os.environ["ZLAUNCH_RUN_DIR"], a folder per trial'
            )
        search(self._space(), self.measure)
        placements = [trial.variant.placement for trial in self.results.trials]
        if not any(placement is not None and placement.is_offloaded for placement in placements):
            click.echo("offload was not tried: what was tried fits without it")

    def _space(self) -> Space:
        from zlaunch.supervisor import run_folder
        from zlaunch.tuning.search import Space
        from zlaunch.tuning.trial import read_batch, read_rows
        from zlaunch.tuning.variants import given_placement

        first = self.results.folder / "runs" / "001"
        self.batch = read_batch(first)
        record = run_folder.read(first)
        world = record.world_size if record is not None else 1
        placement = given_placement(self.raw)
        key = "train_micro_batch_size_per_gpu"
        fixed = self.raw.get(key) == "auto" or self.batch is None
        if self.raw.get(key) == "auto":
            click.echo(f'micro-batches are not varied: {key} is "auto", the script\'s arguments set it')
        rows = read_rows(first)
        if not fixed and self.batch is not None and rows is not None and rows != self.batch.micro:
            click.echo(f"the model's input has {rows} rows, {key} is {self.batch.micro}: it is not changed")
            fixed = True
        if fixed or self.batch is None:
            return Space(placement, None, (), world)
        if self.batch.micros()[-1] == self.batch.micro:
            steps = "gradient_accumulation_steps"
            click.echo(
                f"larger micro-batches are not tried: with the same samples a step, {steps} is too small"
            )
        return Space(placement, self.batch.micro, self.batch.micros(), world)

    def measure(self, variant: Variant) -> Trial:
        """Run a variant, or return what it has shown already."""
        from zlaunch.tuning.trial import read_rows, run_trial
        from zlaunch.tuning.variants import change_config

        number = len(self.results.trials) + 1
        trial = self.results.known(variant)
        if trial is None:
            folder = self.results.folder / "runs" / f"{number:03d}"
            config = change_config(self.raw, variant, self.batch)
            trial = run_trial(self.tuned, config, variant, folder, self.limits)
            rows = read_rows(folder)
            if trial.is_ok and variant.micro_batch is not None and rows not in (None, variant.micro_batch):
                trial = trial.but_failed(f"the script has batches of its own: {rows} rows")
            self.results.add(trial)
            click.echo(f"{number:3d}  {variant.name}: {_shown(trial)}")
        if trial.beats(self.best):
            self.best = trial
            best = change_config(self.raw, variant, self.batch)
            (self.results.folder / "ds.tuned.json").write_text(json.dumps(best, indent=2) + "\n")
        return trial

    def show(self) -> None:
        """Print all trials, the fastest first, and where the best config is."""
        from zlaunch.cli.tables import make_table, stdout_console

        ranked = sorted(self.results.trials, key=lambda trial: trial.steps_per_s, reverse=True)
        own = next((trial for trial in ranked if trial.variant.name == "as it is"), None)
        rows = []
        for trial in ranked:
            times = trial.steps_per_s / own.steps_per_s if own is not None and own.is_ok else None
            rows.append(
                (
                    trial.variant.name,
                    f"{trial.steps_per_s:.4g}" if trial.is_ok else "",
                    f"{trial.samples_per_s:.4g}" if trial.samples_per_s else "",
                    f"{trial.tokens_per_s:.0f}" if trial.tokens_per_s else "",
                    f"{trial.mfu:.1%}" if trial.mfu else "",
                    f"{times:.2f}" if times is not None and trial.is_ok else "",
                    f"{trial.memory_gb:.2f} GB" if trial.memory_gb else "",
                    trial.verdict,
                )
            )
        numbers = ("steps/s", "samples/s", "tokens/s", "MFU", "times your own", "memory")
        stdout_console().print(make_table(("variant", *numbers, "verdict"), rows, right=numbers))
        folder = self.results.folder
        if self.best is None:
            click.echo(f"no run came to a speed: {folder / 'runs'} has what each printed, in console.log")
        else:
            click.echo(f"{folder / 'results.csv'}: all results")
            click.echo(f"{folder / 'ds.tuned.json'}: {self.best.variant.name}")


def _shown(trial: Trial) -> str:
    if not trial.is_ok:
        return trial.verdict
    memory = f", {trial.memory_gb:.2f} GB" if trial.memory_gb else ""
    return f"{trial.steps_per_s:.4g} steps/s{memory}"
