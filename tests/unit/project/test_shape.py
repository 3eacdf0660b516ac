"""Test the shape of the source: which modules import which."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("zlaunch", "runtime", "cuda_ops", "hostfiles", "slurm")
ORDER = (
    "errors",
    "cuda_ops",
    *(
        f"runtime.{name}"
        for name in (
            *(
                "errors",
                "world_sizes",
                "environment",
                "log",
                "trust",
                "report",
                "device",
                "threads",
                "data",
                "mesh",
            ),
            *("host_memory", "models", "optimizer_specs", "config", "restarts", "comm", "precision"),
            *(
                "averaging",
                "step_losses",
                "missing_step",
                "garbage",
                "preemption",
                "zero",
                "fingerprint",
                "batch_watch",
                "optim",
                "offload",
                "activation",
                "compile",
            ),
            *("checkpoint", "engine", "parallel", "memory", "observe", "arguments", "script", "build"),
            *("api", "prepare"),
        )
    ),
    "runtime",
    *("checkpointing", "data", "optim", "sequence", "zero"),  # public names of the runtime
    *("system", "compat", "hostfiles", "slurm", "plan", "transports", "node", "view", "supervisor"),
    *("launchers", "queue", "sweep", "tuning", "kubernetes", "ui", "jobs", "notebook", "cli", "__main__"),
)
"""Folders and top-level files from bottom to top: each imports only those before it."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name; the folder that imitates deepspeed's layout aside."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = list(relative.with_suffix("").parts)
            linked = any(parent.is_symlink() for parent in [path, *path.parents] if ROOT in parent.parents)
            if linked or "path" in parts:
                continue
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts if parts[0] == "zlaunch" else ["zlaunch", *parts])] = path
    return found


def walk_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a run of the module reaches."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from walk_run(node)


@cache
def imports(name: str) -> frozenset[str]:
    """The modules that one imports, at its top and inside of functions. Blocks ``if TYPE_CHECKING:`` do not
    count: an annotation may name the class that a parameter is of, even where that is built from this module.
    """
    if name == "zlaunch":  # it imports nothing: it names what is loaded when somebody asks for it
        return frozenset()
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in walk_run(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                found.add(whole if whole in modules() else source)
    return frozenset(found & modules().keys() - {name})


def circles() -> list[list[str]]:
    """Modules that import each other, by way of others or not: every strongly connected set (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports(name):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            members = [stack.pop()]
            while members[-1] != name:
                members.append(stack.pop())
            if len(members) > 1:
                found.append(sorted(members))

    for name in modules():
        if name not in index:
            visit(name)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not circles()


def place(name: str) -> int | None:
    """Return the place of a module in the order; None for the package itself, which imports nothing at its
    start.
    """
    words = name.split(".")[1:]
    for length in (2, 1):
        if ".".join(words[:length]) in ORDER:
            return ORDER.index(".".join(words[:length]))
    assert not words, f"{name} is in no folder of ORDER"
    return None


def test_imports_between_folders_go_one_way() -> None:
    against = set()
    for name in modules():
        own = place(name)
        for other in imports(name):
            its = place(other)
            if own is not None and its is not None and its > own:
                against.add(f"{name} imports {other}")
    assert not sorted(against)


def test_no_two_classes_have_one_name() -> None:
    count = Counter(
        node.name
        for name, path in modules().items()
        if not name.startswith("zlaunch.compat")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, times in count.items() if times > 1}


def test_the_runtime_prints_by_its_log_alone() -> None:
    # parts of a script without zlaunch
    script = [f"checkpoint.{name}" for name in ("format.manifest", "export.named", "export.full_weights")]
    may = {f"zlaunch.runtime.{name}" for name in ("log", "config.reference", *script)}
    prints = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if name.startswith("zlaunch.runtime.") and isinstance(node, ast.Name) and node.id == "print"
    }
    assert prints == may


def test_data_is_in_the_folder_for_data() -> None:
    tests = ROOT / "tests"
    found = [path for path in tests.rglob("*") if path.is_file() and tests / "data" not in path.parents]
    assert not [str(path) for path in found if path.suffix not in (".py", ".pyc")]
