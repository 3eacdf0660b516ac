"""Compare the choice of `zlaunch tune` with the best of all variants: `python -m benchmarks.tune`.

Every variant of the example runs once, with two workers. The search reads its figures from that table. At the
end, its choice and the best variant run again, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from statistics import median

from zlaunch.tuning.search import Space, Trial, search
from zlaunch.tuning.trial import TrialLimits, TunedCommand, run_trial
from zlaunch.tuning.variants import (
    DEVICE_PLACEMENTS,
    HOST_PLACEMENTS,
    BatchSizes,
    Variant,
    change_config,
    given_placement,
)

ROOT = Path(__file__).resolve().parents[1]
BUCKETS = (None, 5_000_000, 50_000_000)
BATCH = BatchSizes(micro=2, accumulation=8, world_size=2)


def main() -> None:
    """Run all variants, let the search choose among them, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", default=None, help="file for the results")
    args = parser.parse_args()
    raw = json.loads((ROOT / "examples/ds_stage2.json").read_text())
    raw |= {
        "train_batch_size": BATCH.micro * BATCH.accumulation * BATCH.world_size,
        "train_micro_batch_size_per_gpu": BATCH.micro,
        "gradient_accumulation_steps": BATCH.accumulation,
    }
    limits = TrialLimits(3, args.steps, 300.0)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "ds.json")
        config.write_text(json.dumps(raw))
        script = (str(ROOT / "examples/train_gpt.py"), "--config", str(config))
        tuned = TunedCommand((f"--num_gpus={BATCH.world_size}",), script, str(config), str(config))
        space = Space(given_placement(raw), BATCH.micro, BATCH.micros(), BATCH.world_size)
        numbers = itertools.count(1)

        def measure(variant: Variant) -> Trial:
            place = Path(folder, "runs", str(next(numbers)))
            return run_trial(tuned, change_config(raw, variant, BATCH), variant, place, limits)

        table: dict[Variant, Trial] = {}
        for placement in (*DEVICE_PLACEMENTS, *HOST_PLACEMENTS):
            for micro, bucket in itertools.product(BATCH.micros(), BUCKETS):
                variant = Variant(
                    None if placement == space.placement else placement,
                    None if micro == BATCH.micro else micro,
                    bucket,
                )
                table[variant] = measure(variant)
                print(f"{len(table)}  {variant.name}: {table[variant].steps_per_s:.3f} steps/s", flush=True)
        taken: list[Variant] = []

        def look_up(variant: Variant) -> Trial:
            taken.append(variant)
            # prefetching is not part of the table: as it is
            return table[variant.but(prefetches=None)]

        chosen = search(space, look_up)
        best = max(table.values(), key=lambda trial: trial.steps_per_s)
        assert chosen is not None
        pairs = [(measure(chosen.variant), measure(best.variant)) for _ in range(args.pairs)]
    result = {
        "variants": len(table),
        "runs of the search": len(taken),
        "chosen": chosen.variant.name,
        "best": best.variant.name,
        "chosen over best, in the table": chosen.steps_per_s / best.steps_per_s,
        "chosen over best, in pairs": median(one.steps_per_s / other.steps_per_s for one, other in pairs),
        "table": {variant.name: trial.steps_per_s for variant, trial in table.items()},
    }
    print(json.dumps({name: value for name, value in result.items() if name != "table"}, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
