"""Define what the queue's daemon hands to `zlaunch.cli.queued`, which may be of another zlaunch.

Note [Two versions of zlaunch]
The daemon starts each job with the interpreter and the zlaunch that it was submitted with, whatever zlaunch
the daemon itself is. The two share the start request and the files of an attempt. Both carry PROTOCOL, and
whoever reads another number refuses it by name. Raise PROTOCOL when a field changes its meaning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.queue.process_settings import ProcessSettings

PROTOCOL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """Says which attempt to run. It is one word of a command line."""

    folder: str
    """The queue's folder."""
    job: int
    attempt: int
    run_id: str
    lock: int
    """Descriptor of the attempt's lock."""
    version: str
    """The zlaunch that the job was submitted with; "" where that is not known."""
    path: str
    """The folder of that zlaunch's package."""
    settings: ProcessSettings | None
    """The submitter's settings; None where they are not known."""

    def as_text(self) -> str:
        """Return the word."""
        about: dict[str, Any] = {"protocol": PROTOCOL, "daemon": __version__}
        about |= {name: getattr(self, name) for name in self.__slots__ if name != "settings"}
        about["settings"] = None if self.settings is None else self.settings.as_json()
        return json.dumps(about)

    @classmethod
    def read(cls, text: str) -> StartRequest:
        """Read the word. Raises LaunchError, which names both versions where they do not fit."""
        try:
            about = json.loads(text)
            protocol = about["protocol"]
            daemon = str(about["daemon"])
        except (ValueError, TypeError, KeyError):
            raise LaunchError(
                f"the queue's daemon runs an older zlaunch and cannot start jobs of zlaunch {__version__}: "
                "wait until its jobs have ended, then submit again"
            ) from None
        if protocol != PROTOCOL:
            raise LaunchError(
                f"the queue's daemon (zlaunch {daemon}) speaks protocol {protocol}, and this job's zlaunch "
                f"{__version__} speaks {PROTOCOL}: submit again with zlaunch {daemon}"
            )
        try:
            settings = None if about["settings"] is None else ProcessSettings.from_json(about["settings"])
            texts = {name: str(about[name]) for name in ("folder", "run_id", "version", "path")}
            numbers = {name: int(about[name]) for name in ("job", "attempt", "lock")}
            return cls(**texts, **numbers, settings=settings)  # type: ignore[arg-type]  # mypy joins the types
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(f"the daemon's request is damaged: {error!r}") from None
