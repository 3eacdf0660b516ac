"""Names of DeepSpeed that zlaunch has nothing for: they can be imported, and are an error when used."""

from __future__ import annotations

from typing import Any, NoReturn


class NotInZlaunch(NotImplementedError):
    """A part of DeepSpeed that zlaunch does not have."""


def _fail(name: str, instead: str) -> NoReturn:
    raise NotInZlaunch(f"deepspeed.{name} is not in zlaunch: {instead}")


def missing_class(name: str, instead: str) -> type:
    """A class that can be imported, subclassed and used in ``isinstance``, but raises NotInZlaunch when it is
    made. ``instead`` says what to do.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        _fail(name, instead)

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": f"Not in zlaunch: {instead}."})


def missing_function(name: str, instead: str) -> Any:
    """A function that raises NotInZlaunch when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _fail(name, instead)

    refuse.__name__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not in zlaunch: {instead}."
    return refuse


def absent(module: str) -> Any:
    """A module's ``__getattr__``: names that it does not have are an error that says why."""

    def get(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(
            f"{module}.{name} is not in zlaunch, which stands for DeepSpeed here (docs/from-deepspeed.md has "
            "what there is; --compat none uses an installed DeepSpeed)"
        )

    return get
