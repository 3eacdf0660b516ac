"""Mutations of Adafactor's step, and of its state in checkpoints."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_STEP = "runtime/optim/adafactor.py"
_FILE = "tests/runtime/collective_step/test_adafactor.py"
_STAGES = f"{_FILE}::test_every_stage_and_offload_equals_plain_torch[torch-2]"
_OPTIONS = f"{_FILE}::test_the_options_do_what_they_do_in_plain_torch"
_RESUME = f"{_FILE}::test_runs_resume_in_another_world"
_WHOLE = f"{_FILE}::test_state_of_whole_tensors_in_a_checkpoint_goes_on_in_parts"

MUTATIONS = [
    Mutation(
        _STEP,
        "values = values.reshape(-1) / part.unit.copies",
        "values = values.reshape(-1)",
        "ranks that keep the same part all add it",
        (_STAGES,),
    ),
    Mutation(
        _STEP,
        "return torch.arange(self.first, self.stop, device=device) // self.rows",
        "return torch.arange(self.stop - self.first, device=device) // self.rows",
        "lines of a part that begins inside of a parameter get another matrix's moments",
        (_STAGES,),
    ),
    Mutation(
        _STEP,
        '            if group.get("maximize"):\n                grad.neg_()\n',
        "",
        "maximize is ignored",
        (_OPTIONS,),
    ),
    Mutation(
        _STEP,
        'most = 1e-6 * step if group["warmup_init"] else 1e-2',
        "most = 1e-2",
        "warmup_init is ignored",
        (_OPTIONS,),
    ),
    Mutation(
        _STEP,
        "found[name] = mean * weight if before is None else before.to(empty).lerp(mean, weight)",
        "found[name] = mean * weight",
        "second moments of rows and columns forget former steps",
        (_STAGES,),
    ),
    Mutation(
        "runtime/checkpoint/shard_io.py",
        "            own[PARAMETER_STATE] = whole\n",
        "            pass\n",
        "a resume begins with new second moments of rows and columns",
        (_RESUME, _WHOLE),
    ),
    Mutation(
        "runtime/checkpoint/shard_io.py",
        "            found[key] = whole.view(unit.shapes[index])",
        "            pass",
        "sums of rows that were saved as state of each element are dropped",
        (_WHOLE,),
    ),
]
