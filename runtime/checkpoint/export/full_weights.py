"""Write the weights of a zlaunch checkpoint in the formats that others read. Needs torch alone.

python zero_to_fp32.py FOLDER OUT [--tag TAG] [--dtype fp32|bf16|fp16] [--max_shard_size 5GB]
                                  [--format safetensors|bin] [--like FOLDER]
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..format.manifest import Checkpoint
from ..format.tensor_file import DTYPES, CheckpointError, bytes_of, header_of, memory_of, replacing
from .named import open_checkpoint

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PIECE_NUMEL = 1 << 20
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")

_COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *(
        "vocab*",
        "merges.txt",
        "*.model",
        "chat_template*",
        "preprocessor_config.json",
        "processor_config.json",
    ),
)
"""Files of a Hugging Face model beside its weights."""


def export(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5 * 10**9,
    kind: str = "safetensors",
    exclude_frozen: bool = False,
) -> list[Path]:
    """Write the weights to the folder ``out`` as Hugging Face reads them, and return the files.

    ``kind`` is "safetensors" (``model.safetensors``) or "bin" (``pytorch_model.bin``); what is larger than
    ``max_shard_bytes`` is split, with an index. Floating tensors are cast to ``dtype``. Memory: some 40 MiB,
    whatever the model's size; "bin" maps a temporary file as large as a shard. A file appears whole or not
    at all. Raises OSError, and CheckpointError also where ``out`` has weights in other files.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    shards = _split(checkpoint, dtype, max_shard_bytes, exclude_frozen)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names = [
        f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{i + 1:05d}-of-{len(shards):05d}.{suffix}"
        for i in range(len(shards))
    ]
    index = out / f"{stem}.{suffix}.index.json"
    others = [path for path in out.iterdir() if _WEIGHTS.fullmatch(path.name)]
    # Loaders prefer one file, or an index, to others in a folder: what an earlier export has left would win
    # silently.
    stale = [path.name for path in others if path.name not in names and path != index]
    if stale or (index.exists() and len(shards) == 1):
        raise CheckpointError(
            f"{out}: has other weights ({(stale or [index.name])[0]}), which could be loaded instead of "
            "these: remove them, or use another folder"
        )
    written: list[Path] = []
    for name, shard in zip(names, shards, strict=True):
        with replacing(out / name) as temporary:
            _write_safetensors(checkpoint, temporary, shard)
            if kind == "bin":
                _to_bin(temporary, checkpoint.tied)
        written.append(out / name)
    if len(shards) > 1:
        # The index comes last: until it is there, no reader takes a part of the shards for the model.
        places = {w: name for name, shard in zip(names, shards, strict=True) for w in shard}
        if kind == "bin":
            places |= {alias: places[name] for alias, name in checkpoint.tied.items() if name in places}
        size = sum(bytes_of(*entry) for shard in shards for entry in shard.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
        with replacing(index) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        written.append(index)
    return written


def companions(checkpoint: Checkpoint, like: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the config and tokenizer files that a Hugging Face model has beside its weights.

    They are those of the folder ``like``; without it those beside the checkpoint or one or two folders above,
    where the Trainer puts them, if there are any. Raises CheckpointError where ``like`` has none.
    """
    folder = checkpoint.folder.absolute()
    for place in [folder, *folder.parents[:2]] if like is None else [Path(like)]:
        try:
            files = [path for path in sorted(place.iterdir()) if path.is_file()]
        except OSError as error:
            if like is None:
                continue  # a folder above, which is not for us
            raise CheckpointError(
                f"{like}: cannot read config and tokenizer files: {error.strerror}"
            ) from None
        found = [path for path in files if any(path.match(pattern) for pattern in _COMPANIONS)]
        # A config.json that nobody has named may be of any program.
        if found and (like is not None or _is_hugging_face(place / "config.json")):
            return found
    if like is not None:
        raise CheckpointError(f"{like}: has no config.json and no tokenizer files")
    return []


def _is_hugging_face(config: Path) -> bool:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        return isinstance(content, dict) and bool(content.keys() & {"model_type", "architectures"})
    except (OSError, ValueError):
        return False


def copy_companions(
    found: Sequence[Path], out: str | os.PathLike[str], *, replace: bool, dtype: torch.dtype
) -> list[Path]:
    """Copy files to the folder ``out`` and return the copies; others of these names stay, unless
    ``replace``. The config.json there gets the ``dtype`` of the weights. Raises OSError.
    """
    copies = []
    for path in found:
        copy = Path(out) / path.name
        if copy.exists() and (not replace or copy.samefile(path)):
            continue
        with replacing(copy) as temporary:
            shutil.copyfile(path, temporary)
        copies.append(copy)
    config = Path(out) / "config.json"
    if _is_hugging_face(config):
        content = json.loads(config.read_text(encoding="utf-8"))
        if _name_dtype(content, str(dtype).removeprefix("torch.")):
            with replacing(config) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            copies += [config] if config not in copies else []
    return copies


def _name_dtype(config: dict[str, Any], name: str) -> bool:
    """Set the dtype of a model, also of its parts such as ``text_config``; tell whether any has changed."""
    changed = False
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and value != name:
            config[key] = name
            changed = True
        elif key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            changed = _name_dtype(value, name) or changed
    return changed


_Shard = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _split(checkpoint: Checkpoint, dtype: torch.dtype, limit: int, exclude_frozen: bool) -> list[_Shard]:
    shards: list[_Shard] = [{}]
    filled = 0
    for name, own, shape in checkpoint.weights(exclude_frozen=exclude_frozen):
        kind = dtype if own.is_floating_point else own
        nbytes = bytes_of(kind, shape)
        # A tensor above the limit gets a shard for itself.
        if shards[-1] and filled + nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = (kind, shape)
        filled += nbytes
    return shards


def _write_safetensors(checkpoint: Checkpoint, path: Path, shard: _Shard) -> None:
    tied = {alias: name for alias, name in checkpoint.tied.items() if name in shard}
    with open(path, "wb") as file:
        file.write(header_of(shard, tied))
        for name, (dtype, shape) in shard.items():
            numel = bytes_of(dtype, shape) // dtype.itemsize
            for start in range(0, numel, _PIECE_NUMEL):
                piece = torch.empty(min(_PIECE_NUMEL, numel - start), dtype=dtype)
                checkpoint.weight_into(piece, name, start)
                file.write(memory_of(piece))
        file.flush()
        os.fsync(file.fileno())


def _to_bin(path: Path, tied: Mapping[str, str]) -> None:
    """Replace a safetensors file by what torch.save makes of its tensors, mapped, not read."""
    import numpy as np

    tensors: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        low, high = entry["data_offsets"]
        flat = torch.empty(0, dtype=torch.uint8)
        if high > low:
            # Copy-on-write: torch wants memory that can be written to, and the file must not change.
            mapped = np.memmap(path, np.uint8, "c", 8 + length + low, (high - low,))
            flat = torch.from_numpy(mapped)
        tensors[name] = flat.view(DTYPES[entry["dtype"]]).view(tuple(entry["shape"]))
    tensors |= {alias: tensors[name] for alias, name in tied.items() if name in tensors}
    try:
        with replacing(path) as other, open(other, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # how torch.save says that the disk is full
        raise OSError(errno.EIO, f"cannot be written by torch.save: {error}", str(path)) from None


def parse_size(text: str) -> int:
    """Read ``"5GB"``, ``"500MiB"`` or a number of bytes. Raises ValueError."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30}
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]I?)?B?\s*", text.upper())
    if not found or found[1].count(".") > 1 or (found[2] or "") not in units or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a size: write 5GB or 500MiB")
    return max(1, int(float(found[1]) * units[found[2] or ""]))


# -- DeepSpeed's names for it


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the whole model's weights on the CPU, floating ones in fp32; tied weights are one tensor.

    For a model larger than memory, use :func:`convert_zero_checkpoint_to_fp32_state_dict`.

    Args:
        checkpoint_dir: Folder that was passed to ``save_checkpoint``, or the folder of one checkpoint.
        tag: Name of a checkpoint; "auto" for the newest whole one; None for what ``latest`` names.
        exclude_frozen_parameters: Leave frozen parameters out.
        lazy_mode: Accepted for DeepSpeed's scripts, without effect.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    checkpoint = open_checkpoint(checkpoint_dir, tag)
    state: dict[str, Tensor] = {}
    for name, dtype, shape in checkpoint.weights(exclude_frozen=exclude_frozen_parameters):
        state[name] = torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
        checkpoint.weight_into(state[name].view(-1), name)
    state |= {alias: state[name] for alias, name in checkpoint.tied.items() if name in state}
    checkpoint.close()
    return state


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Load a checkpoint's fp32 weights into a plain model, where names agree; warn of the others.

    Args:
        model: The model. It is moved to the CPU.
        checkpoint_dir: Folder that was passed to ``save_checkpoint``, or the folder of one checkpoint.
        tag: Name of a checkpoint; "auto" for the newest whole one; None for what ``latest`` names.

    Returns:
        The model.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or no name agrees.
    """
    model = model.cpu()
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    result = model.load_state_dict(state, strict=False)
    if state and len(result.unexpected_keys) == len(state):
        raise CheckpointError(
            f"{checkpoint_dir}: does not match the model: none of its {len(state)} weights, such as "
            f"{next(iter(state))}, is in the model"
        )
    for keys, what in (
        (result.missing_keys, "lacks weights of the model, which keep their values"),
        (result.unexpected_keys, "has weights that are not in the model and are not loaded"),
    ):
        if keys:
            names = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            print(f"zlaunch: warning: {checkpoint_dir} {what}: {names}", file=sys.stderr, flush=True)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole model's weights in fp32 as Hugging Face reads them.

    It takes about 40 MiB of memory. For ``pytorch_model.bin`` it maps a temporary file as large as a shard.

    Args:
        checkpoint_dir: Folder that was passed to ``save_checkpoint``, or the folder of one checkpoint.
        output_dir: Folder of the files; made if it does not exist.
        max_shard_size: Size at which weights are split into several files: bytes, or "5GB"; None for one
            file.
        safe_serialization: Write ``model.safetensors`` instead of ``pytorch_model.bin``.
        tag: Name of a checkpoint; "auto" for the newest whole one; None for what ``latest`` names.
        exclude_frozen_parameters: Leave frozen parameters out.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or the folder has weights in other files.
        OSError: The files cannot be written.
        ValueError: ``max_shard_size`` is not a size.
    """
    limit = parse_size(str(max_shard_size)) if max_shard_size is not None else sys.maxsize
    export(
        open_checkpoint(checkpoint_dir, tag),
        output_dir,
        max_shard_bytes=limit,
        kind="safetensors" if safe_serialization else "bin",
        exclude_frozen=exclude_frozen_parameters,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this file, and return its exit code."""
    parser = argparse.ArgumentParser(description="Write the weights of a zlaunch checkpoint to a folder.")
    parser.add_argument(
        "checkpoint_dir", help="folder with the file `latest`, or the folder of one checkpoint"
    )
    parser.add_argument("output_dir")
    parser.add_argument("-t", "--tag", help='checkpoint to export; "auto" for the newest whole one')
    parser.add_argument("--dtype", choices=list(PRECISIONS), default="fp32")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--format", choices=["bin", "safetensors"], default="bin")
    parser.add_argument("--safe_serialization", action="store_true", help="same as --format safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("--like", help="copy config and tokenizer from this Hugging Face model folder")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, no effect")
    args = parser.parse_args(arguments)
    try:
        checkpoint = open_checkpoint(args.checkpoint_dir, args.tag)
        beside = companions(checkpoint, args.like)
        written = export(
            checkpoint,
            args.output_dir,
            dtype=PRECISIONS[args.dtype],
            max_shard_bytes=parse_size(args.max_shard_size),
            kind="safetensors" if args.safe_serialization else args.format,
            exclude_frozen=args.exclude_frozen_parameters,
        )
        written += copy_companions(
            beside, args.output_dir, replace=args.like is not None, dtype=PRECISIONS[args.dtype]
        )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"zero_to_fp32: error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
