"""Builds ``zero_to_fp32.py``, which lies beside every checkpoint, from the modules that read and export."""

from __future__ import annotations

import ast
import inspect
from functools import cache

from .... import errors
from ...comm import shard_spec
from .. import trainer_checkpoints
from ..format import manifest, tensor_file
from . import full_weights, named

NAME = "zero_to_fp32.py"


@cache
def text() -> str:
    """Return the script: it needs torch, and neither zlaunch nor the safetensors package."""
    modules = (errors, tensor_file, shard_spec, manifest, trainer_checkpoints, named, full_weights)
    sources = [inspect.getsource(module) for module in modules]
    usage = ast.get_docstring(ast.parse(sources[-1]))
    head = f'#!/usr/bin/env python3\n"""{usage}\n"""\n\nfrom __future__ import annotations\n'
    return "\n\n".join([head, *map(_without_relative_imports, sources)])


def _without_relative_imports(source: str) -> str:
    """Return a module below its docstring, without imports of its neighbours and of ``__future__``."""
    dropped: set[int] = set()
    for index, node in enumerate(ast.parse(source).body):
        # Relative imports name modules that stand in the script itself. `from __future__` may only come
        # first, and stands there once.
        own = isinstance(node, ast.ImportFrom) and (node.level > 0 or node.module == "__future__")
        if own or index == 0:
            assert node.end_lineno is not None
            dropped.update(range(node.lineno, node.end_lineno + 1))
    kept = [line for number, line in enumerate(source.splitlines(), 1) if number not in dropped]
    return "\n".join(kept).strip() + "\n"
