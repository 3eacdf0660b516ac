"""Tell an error in talking to other ranks from a script's own. Without imports: every worker has it."""

from __future__ import annotations

_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "PeerLost")
_FOLDERS = ("/torch/distributed/", "/zlaunch/runtime/")
_WORDS = (
    "gloo",
    "NCCL",
    "ProcessGroup",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)
_LOST = ("PeerLost", "Connection closed by peer", "Connection reset by peer")


def talk_of(error: BaseException) -> str:
    """Return "lost" for an exception that says no more than that another rank has gone, "failed" for another
    failure in talking to the ranks, "" for anything else. The words alone do not count: a download may also
    be reset by its peer.
    """
    text = str(error)
    if not _is_of_torch(error, text):
        return ""
    return "lost" if any(word in f"{type(error).__name__}: {text}" for word in _LOST) else "failed"


def _is_of_torch(error: BaseException, text: str) -> bool:
    kind = type(error)
    if kind.__name__ in _TYPES and kind.__module__.partition(".")[0] in ("torch", "zlaunch"):
        return True
    if not any(word in text for word in _WORDS):
        return False
    if kind.__module__.startswith("zlaunch.runtime."):  # it passes on what torch has said
        return True
    if kind is not RuntimeError:
        return False
    if "/gloo/" in text or "ProcessGroup" in text:  # where it arose, in C++: the script's own line called it
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = frame.tb_frame.f_code.co_filename if frame is not None else ""
    return any(folder in name for folder in _FOLDERS)
