"""List mutations of what zlaunch does for the Hugging Face Trainer."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS = (
    Mutation(
        "runtime/checkpoint/trainer_checkpoints.py",
        "is_whole = 8 + length + max(ends, default=0) == size",
        "is_whole = True",
        "a Trainer resumes from weights that are cut off",
        ("tests/unit/checkpoint/test_resume_of_a_trainer.py",),
    ),
    Mutation(
        "runtime/checkpoint/trainer_checkpoints.py",
        "if last is not None and _step(path) > last:",
        "if False:",
        "a restart resumes from a checkpoint that another run has left in the same output_dir",
        ("tests/unit/checkpoint/test_resume_of_a_trainer.py",),
    ),
    Mutation(
        "runtime/checkpoint/trainer_checkpoints.py",
        "return _problem_of_weights(path, names)",
        "return None",
        "a restart resumes from a checkpoint without weights",
        ("tests/unit/checkpoint/test_resume_of_a_trainer.py",),
    ),
    Mutation(
        "runtime/checkpoint/trainer_checkpoints.py",
        "return problem_of(folder) if is_trainer_checkpoint(folder) else None",
        "return None",
        "`zlaunch checkpoint export` uses what an interrupted save has left",
        ("tests/unit/checkpoint/test_trainer_folders.py",),
    ),
    Mutation(
        "runtime/checkpoint/checkpointer.py",
        'keys = (_BASE_RATE,) if self._run.lr_scheduler is not None else (_BASE_RATE, "lr")',
        'keys = (_BASE_RATE,) if self._run.lr_scheduler is not None else ("lr",)',
        "every load of a run with its own schedule warns of another learning rate",
        ("tests/runtime/checkpoint/test_missing_folders.py",),
    ),
    Mutation(
        "runtime/checkpoint/checkpointer.py",
        "return OF_SCHEDULES if starts else ()",
        "return ()",
        "a new schedule starts from the rate of an imported file, which may be 0",
        ("tests/runtime/checkpoint/test_distributed.py",),
    ),
    Mutation(
        "runtime/checkpoint/checkpointer.py",
        "if None in (saver, mine) or saver == mine:",
        "if True:",
        "a task of a job array loads another task's checkpoint without a warning",
        ("tests/runtime/checkpoint/test_missing_folders.py",),
    ),
    Mutation(
        "runtime/zero/hooks.py",
        "if not after_error:",
        "if True:",
        "torch warns of a hook before the cause, when a rank has exited in a forward pass",
        ("tests/runtime/shared_memory/test_memory.py",),
    ),
    Mutation(
        "runtime/step_losses.py",
        "self._weight = 1.0 if is_share else",
        "self._weight =",
        "the Trainer's loss is divided by the micro-batches twice",
        ("tests/runtime/test_averaging.py",),
    ),
)
