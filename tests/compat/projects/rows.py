"""Which projects run, from which commit, with which command, and how near their numbers have to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from . import inputs

SOURCES = {
    "DeepSpeedExamples": ("https://github.com/deepspeedai/DeepSpeedExamples", "45b4b715"),
    "nanoGPT": ("https://github.com/karpathy/nanoGPT", "3adf61e1"),
    "examples": ("https://github.com/pytorch/examples", "77f55b9"),
    "accelerate": ("https://github.com/huggingface/accelerate", "16cb6eb8"),
    "pytorch-lightning": ("https://github.com/Lightning-AI/pytorch-lightning", "7f0c3436"),
    "LLaMA-Factory": ("https://github.com/hiyouga/LLaMA-Factory", "ff6d4d12"),
    "ms-swift": ("https://github.com/modelscope/ms-swift", "3602360a"),
    "axolotl": ("https://github.com/axolotl-ai-cloud/axolotl", "067b021c"),
}
"""Maps the folders of the clones to where they come from, and a commit that ran."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """Describes one command of a project."""

    name: str
    root: str
    """Names the folder that each run copies, in the folder of the clones. "@trl" stands for the scripts of
    the installed package trl, which are not copied."""
    folder: str = "."
    """Where the command runs, in the copy."""
    command: str
    """The script and its arguments. {inputs} is the folder of ``inputs``, {out} an empty one."""
    starts: Literal["deepspeed", "torchrun"]
    """Names the launcher that the script is written for."""
    beside: str | None = ""
    """The command that runs beside ours, if it is another; None where nothing can run beside it here."""
    beside_ranks: int = 2
    """Counts the workers of what runs beside ours. One worker trains on the samples of both."""
    prints: str = ""
    """A regular expression with a group: the numbers to compare, on rank 0."""
    nearness: float = 0.0
    """Limits the difference between a number and the one beside it."""
    why: str = ""
    """Why numbers may differ, or why nothing runs beside it."""
    is_repeated: bool = False
    """Says that every rank prints the numbers, all of which the launcher beside ours shows."""
    names_cuda: bool = False
    """Says that the script names CUDA devices, and needs the stand-in."""
    prepare: Callable[[Path], None] | None = None
    """Prepares the copy."""
    first: str = ""
    """A command of plain Python that runs first."""
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Requirements besides torch, transformers and accelerate."""


def _deepspeed(name: str, path: str, command: str, **more: object) -> Project:
    root = f"DeepSpeedExamples/{path}"
    return Project(name=name, root=root, command=command, starts="deepspeed", **more)  # type: ignore[arg-type]


_CIFAR = "cifar10_deepspeed.py --deepspeed --epochs 1 --log-interval 1"
_MOE = f"{_CIFAR} --dtype fp32 --moe --ep-world-size 2 --moe-param-group --top-k 1"
_CIFAR_LOSS = r"\] loss: +([\d.]+)"
_CHAT = "applications/DeepSpeed-Chat"
_CHAT_DATA = (
    "--data_path local/jsonfile --data_split 2,4,4 --data_output_path {out}/cache --num_train_epochs 1 "
    "--dtype bf16 --deepspeed"
)
_CHAT_MODEL = (
    f"{_CHAT_DATA} --model_name_or_path {{inputs}}/opt --dropout 0.0 --max_seq_len 64 "
    "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --output_dir {out}/model"
)
_RANK_0_LOSS = r"Rank: 0, loss = ([\d.]+)"
_OLD = ("transformers<5", "datasets<4")
_BF16 = "bf16 adds up in another order"
_MASTERS = (
    "train.py --num_layers 2 --hidden_dim 64 --num_heads 2 --vocab_size 200 --seq_length 32 --num_steps 6 "
    "--log_interval 1 --deepspeed_config configs/"
)
_GPT = (
    "train.py config/train_shakespeare_char.py --compile=False --eval_iters=2 --log_interval=1 "
    "--block_size=32 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=6 --dropout=0.0 "
    "--dtype=float32 --gradient_accumulation_steps=2"
)
_SFT = (
    "scripts/sft.py --model_name_or_path {inputs}/llama --dataset_name {inputs}/text --output_dir {out} "
    "--max_steps 5 --per_device_train_batch_size 2 --logging_steps 1 --report_to none --bf16 false "
    "--learning_rate 1e-3 --max_length 64 --use_cpu true"
)
_LIGHTNING = (
    "autoencoder.py --trainer.accelerator cpu --trainer.devices 2 --trainer.max_epochs 1 "
    "--trainer.logger false --trainer.limit_train_batches 20 --trainer.limit_val_batches 4 "
    "--trainer.limit_test_batches 4 --trainer.limit_predict_batches 2"
)
_FACTORY = (
    "model_name_or_path={inputs}/llama template=default max_samples=24 cutoff_len=64 logging_steps=1 "
    "preprocessing_num_workers=1 dataloader_num_workers=0 output_dir={out} max_steps=5 bf16=false "
    "gradient_accumulation_steps=1 use_cpu=true plot_loss=false"
)
_FACTORY_NEEDS = (
    "transformers<=5.8.0",
    "datasets<=4.0.0",
    "accelerate<=1.11.0",
    "peft<=0.18.1",
    "trl<=0.24.0",
    "torchvision",
    "torchaudio",
    "av",
    "omegaconf",
    "sse-starlette",
    "tyro<0.9",
    "fire",
    "einops",
)
_SWIFT = (
    "swift/cli/sft.py --model {inputs}/llama --model_type llama --template default --tuner_type full "
    "--dataset {inputs}/text/chat.jsonl --torch_dtype float32 --max_steps 5 --learning_rate 1e-3 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --logging_steps 1 --max_length 128 "
    "--output_dir {out} --dataset_num_proc 1 --dataloader_num_workers 0 --use_cpu true --report_to none"
)
_LOGGED_LOSS = r"'loss': '([\d.]+)'"

PROJECTS = [
    *(
        _deepspeed(
            f"cifar, stage {stage}, {dtype}",
            "training/cifar",
            f"{_CIFAR} --dtype {dtype} --stage {stage}",
            prints=_CIFAR_LOSS,
            nearness=0.0011,
            why="printed to three digits",
            needs=("torchvision",),
        )
        for stage, dtype in ((0, "fp32"), (1, "fp16"), (2, "bf16"), (3, "fp32"))
    ),
    _deepspeed(
        "cifar, experts",
        "training/cifar",
        f"{_MOE} --num-experts 2 --noisy-gate-policy RSample",
        prints=_CIFAR_LOSS,
        nearness=0.01,
        why="the gate draws noise",
        needs=("torchvision",),
    ),
    _deepspeed(
        "cifar, residual experts",
        "training/cifar",
        f"{_MOE} --num-experts 2 4 --mlp-type residual",
        prints=_CIFAR_LOSS,
        nearness=0.01,
        why="the gate draws which tokens are left out",
        needs=("torchvision",),
    ),
    _deepspeed(
        "pipeline_parallelism, two stages",
        "training/pipeline_parallelism",
        "train.py --deepspeed_config=ds_config.json -p 2 --steps=2 --backend gloo",
        names_cuda=True,
        beside=None,
        why="DeepSpeed 0.19.8 fails on the CPU: gloo's connection was closed by the other stage",
        needs=("torchvision",),
    ),
    _deepspeed(
        "HelloDeepSpeed",
        "training/HelloDeepSpeed",
        "train_bert_ds.py --checkpoint_dir {out} --tokenizer {inputs}/opt --num_iterations 8 --num_layers 2 "
        "--num_heads 2 --ff_dim 64 --h_dim 32 --log_every 1 --max_seq_length 32 --dtype bf16",
        prints=r"Loss: ([\d.]+)",
        nearness=0.07,
        why="bf16 losses of 11 are 0.0625 apart, and dropout draws",
        needs=("datasets", "fire", "loguru", "sh", "pytz"),
    ),
    *(
        _deepspeed(
            f"bf16_master_weight, {config}",
            "training/bf16_master_weight",
            f"{_MASTERS}{config}.json",
            prints=r"\[Rank 0\] Step \d+: loss=([\d.]+)",
            nearness=0.04,
            why=_BF16,
            names_cuda=True,
        )
        for config in ("baseline", "bf16_full")
    ),
    _deepspeed(
        "AutoTP",
        "training/tensor_parallel/basic_example",
        "autotp_example.py --model_name {inputs}/llama --tp_size 2 --dp_size 1 --zero_stage 1 "
        "--seq_length 32 --num_steps 3 --precision fp32",
        names_cuda=True,
        why="it prints no loss",
    ),
    _deepspeed(
        "GAN",
        "training/gan",
        "gan_deepspeed_train.py --dataset fake --cuda --deepspeed_config gan_deepspeed_config.json "
        "--tensorboard_path {out}/runs --epochs 1 --batchSize 256 --workers 0 --manualSeed 1 --outf {out}",
        names_cuda=True,
        prints=r"\[0/1\]\[\d/4\] Loss_D: ([\d.]+)",
        nearness=0.002,
        is_repeated=True,
        needs=("torchvision", "tensorboard"),
    ),
    *(
        _deepspeed(
            f"DeepSpeed-Chat, step 1, {name}",
            _CHAT,
            f"main.py {_CHAT_MODEL} --print_loss {more}",
            folder="training/step1_supervised_finetuning",
            prepare=inputs.make_chat,
            prints=_RANK_0_LOSS,
            nearness=0.002,
            why=_BF16,
            needs=_OLD,
        )
        for name, more in (
            ("stage 2", "--zero_stage 2"),
            (
                "stage 3, LoRA, offload",
                "--zero_stage 3 --offload --lora_dim 4 --lora_module_name decoder.layers.",
            ),
        )
    ),
    _deepspeed(
        "DeepSpeed-Chat, step 2, rewards",
        _CHAT,
        f"main.py {_CHAT_MODEL} --zero_stage 2 --num_padding_at_beginning 1 --eval_interval 2",
        folder="training/step2_reward_model_finetuning",
        prepare=inputs.make_chat,
        prints=r"Iter \d+: c_scores: (-?[\d.]+)",
        nearness=0.02,
        why=_BF16,
        needs=_OLD,
    ),
    _deepspeed(
        "DeepSpeed-Chat, step 2, DPO",
        _CHAT,
        f"main.py {_CHAT_MODEL} --zero_stage 3 --print_loss",
        folder="training/step2_dpo_finetuning",
        prepare=inputs.make_chat,
        prints=_RANK_0_LOSS,
        nearness=0.06,
        why="sums of 16 bits",
        needs=_OLD,
    ),
    _deepspeed(
        "DeepSpeed-Chat, step 3, stage 3",
        _CHAT,
        f"main.py {_CHAT_DATA} --actor_model_name_or_path {{inputs}}/opt --critic_model_name_or_path "
        "{inputs}/critic --num_padding_at_beginning 1 --per_device_generation_batch_size 2 "
        "--per_device_training_batch_size 2 --generation_batches 1 --ppo_epochs 1 --max_answer_seq_len 16 "
        "--max_prompt_seq_len 32 --actor_zero_stage 3 --critic_zero_stage 3 --actor_dropout 0.0 --enable_ema "
        "--output_dir {out}/model",
        folder="training/step3_rlhf_finetuning",
        prepare=inputs.make_chat,
        beside=None,
        why="answers are drawn; DeepSpeed 0.19.8 fails with an AssertionError in defragment",
        needs=_OLD,
    ),
    Project(
        name="nanoGPT",
        root="nanoGPT",
        command=_GPT,
        starts="torchrun",
        first="data/shakespeare_char/prepare.py",
        prepare=inputs.make_characters,
        prints=r"iter \d+: loss ([\d.]+)",
        nearness=1e-4,
        names_cuda=True,
    ),
    *(
        Project(
            name=f"pytorch/examples, {name}",
            root=f"examples/distributed/{folder}",
            command=command,
            starts="torchrun",
            names_cuda=True,
            why="it prints no loss",
        )
        for name, folder, command in (
            ("ddp-tutorial-series", "ddp-tutorial-series", "multigpu_torchrun.py 2 1"),
            ("ddp", "ddp", "example.py"),
            ("FSDP2", "FSDP2", "example.py"),
            ("tensor_parallel", "tensor_parallelism", "tensor_parallel_example.py"),
            ("sequence_parallel", "tensor_parallelism", "sequence_parallel_example.py"),
        )
    ),
    Project(
        name="trl, SFT, stage 3",
        root="@trl",
        command=f"{_SFT} --deepspeed {{inputs}}/ds_script.json",
        starts="torchrun",
        beside=_SFT,
        prints=_LOGGED_LOSS,
        nearness=0.0011,
        why="printed to four digits",
        needs=("trl",),
    ),
    *(
        Project(
            name=f"Lightning, {strategy}",
            root="pytorch-lightning/examples/pytorch/basics",
            command=f"{_LIGHTNING} --trainer.strategy {strategy}",
            starts="torchrun",
            beside=_LIGHTNING,
            prints=r"test_loss_epoch *│ *([\d.]+)",
            nearness=1e-7,
            env={"STAND_IN_MNIST": "{inputs}/mnist"},
            needs=("lightning", "jsonargparse", "docstring-parser", "typeshed-client", "torchvision"),
        )
        for strategy in ("ddp", "deepspeed_stage_2", "deepspeed_stage_3_offload")
    ),
    *(
        Project(
            name=f"LLaMA-Factory, {name}",
            root="LLaMA-Factory",
            command=f"src/train.py examples/{example} {_FACTORY} deepspeed=examples/deepspeed/{config}.json",
            starts="torchrun",
            beside=f"src/train.py examples/{example} {_FACTORY} deepspeed=null",
            prints=_LOGGED_LOSS,
            nearness=0.0011,
            why="printed to four digits",
            env={"DISABLE_VERSION_CHECK": "1"},
            needs=_FACTORY_NEEDS,
        )
        for name, example, config in (
            ("LoRA, stage 3", "train_lora/qwen3_lora_sft.yaml", "ds_z3_config"),
            ("full, stage 2, offload", "train_full/qwen3_full_sft.yaml", "ds_z2_offload_config"),
        )
    ),
    Project(
        name="ms-swift, stage 3",
        root="ms-swift",
        command=f"{_SWIFT} --deepspeed zero3",
        starts="torchrun",
        beside=_SWIFT,
        prints=_LOGGED_LOSS,
        nearness=0.0011,
        why="printed to four digits",
        env={"USE_HF": "1"},
        needs=(
            "transformers<5.17",
            "datasets>=4.1,<4.8.5",
            "trl<1.0",
            "peft<0.21",
            "modelscope",
            "json-repair",
        ),
    ),
    Project(
        name="axolotl, stage 3",
        root="axolotl",
        folder="src",
        command="-m axolotl.cli.train {inputs}/axolotl.json --deepspeed=../deepspeed_configs/zero3.json",
        starts="torchrun",
        beside="-m axolotl.cli.train {inputs}/axolotl.json --micro_batch_size=4",
        beside_ranks=1,
        prints=_LOGGED_LOSS,
        nearness=0.0011,
        why="printed to four digits; without ZeRO, axolotl wants a GPU for each of two workers",
        env={"AXOLOTL_DO_NOT_TRACK": "1"},
        needs=("axolotl", "transformers<5.15", "trl<1.9", "datasets<4.9", "triton"),
    ),
    Project(
        name="accelerate, stage 3",
        root="accelerate/examples/by_feature",
        command="deepspeed_with_config_support.py --train_file {inputs}/text/train.json --validation_file "
        "{inputs}/text/train.json --model_name_or_path {inputs}/llama --block_size 32 --num_train_epochs 2 "
        "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --output_dir {out} "
        "--learning_rate 1e-3",
        starts="torchrun",
        beside=None,
        why="DeepSpeed 0.19.8 treats each of the two CPU workers as a separate run",
        env={
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{inputs}/ds_auto.json",
        },
        needs=("datasets",),
    ),
]
