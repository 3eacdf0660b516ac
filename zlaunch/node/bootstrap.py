"""Run one worker: `python -m zlaunch.node.bootstrap [--module|--exec] TARGET ARGS...`.

The user's program must not be able to tell it from `python script.py`; what we add is that it dies with its
agent, prints its stacks on SIGUSR2, and hands an uncaught exception to the launcher as data. Keep the imports
few: they are part of every worker's start-up time.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from zlaunch.errors import ZlaunchError
from zlaunch.node import accelerate_state, local_rank_option
from zlaunch.node.long_traceback import shorten
from zlaunch.runtime.trust import make_folder
from zlaunch.system.processes import PASSED_SIGNALS, die_with_parent

# -- error file -------------------------------------------------------------------------------------
#
# Carry what torch's `@record` says of an error to the run's folder, which may be on another machine.


_NAME = "TORCHELASTIC_ERROR_FILE"
_LIMIT_CHARS = 1 << 20


def offer() -> str | None:
    """Name a file for `@record` in this node's memory and return its path; None where there is one already,
    or none can be made.
    """
    folder = os.environ.get("ZLAUNCH_MEMORY_DIR")
    if not folder or _NAME in os.environ:
        return None
    path = os.path.join(folder, f"error_{os.environ.get('RANK', '0')}.json")
    try:
        make_folder(Path(folder))
        if os.path.exists(path):  # an earlier attempt's
            os.unlink(path)
    except OSError:
        return None
    os.environ[_NAME] = path
    return path


def hand_over(path: str | None, event_fd: int) -> None:
    """Send what is in the file to the launcher, if there is something."""
    try:
        if path is None or event_fd < 0 or not os.path.exists(path):
            return
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_LIMIT_CHARS + 1)
        if len(text) > _LIMIT_CHARS:
            text = json.dumps({"message": f"the first part of a long one: {text[: _LIMIT_CHARS // 8]}"})
        event = {"type": "error_file", "text": text}
        os.write(event_fd, json.dumps(event).encode() + b"\n")
    except OSError:  # the agent is gone, so there is no one to tell
        pass


# -- lost peers -------------------------------------------------------------------------------------
#
# Tell an error in talking to other ranks from a script's own. Without imports: every worker has it.


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


# -- bootstrap --------------------------------------------------------------------------------------


_SAVED_CODE = 75
"""end.SAVED_CODE, without an import before the script's own."""
_OUR_FILES = {__file__, runpy.__file__, "<frozen runpy>"}
_DEVICES = "CUDA_VISIBLE_DEVICES"
_PASSES = "ZLAUNCH_PASSES_LOCAL_RANK"
"""Is set where a script that knows --local_rank gets it."""
_OUR_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_EVENT_FD_FLOOR = 200
_TRACEBACK_LIMIT_CHARS = 1 << 18


def main() -> None:
    """Prepare this process and become the target."""
    agent_pid = os.environ.pop("ZLAUNCH_AGENT_PID", "")
    if agent_pid:
        die_with_parent(int(agent_pid))
    if cpus := os.environ.pop("ZLAUNCH_CPUS", ""):
        _bind(cpus)
    if os.environ.pop("ZLAUNCH_IGNORE_HUP", ""):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # meant for the launchers of the step, not for us
    mode = "--script"
    args = sys.argv[1:]
    if args[0] in ("--module", "--exec"):
        mode = args.pop(0)
    if mode == "--exec":
        os.environ.pop(_PASSES, None)
        _choose_deepspeed()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_SIGNALS)
        _exec(args)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    # "Save and stop" must not kill a script that has not come to zlaunch.initialize yet, or never will.
    signal.signal(signal.SIGUSR1, _note_stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_SIGNALS)
    event_fd = _own_event_fd()
    _take_debugger(event_fd)
    pid = os.getpid()
    recorded = offer()
    devices = os.environ.get(_DEVICES)
    try:
        if mode == "--module":
            _run_module(args)
        else:
            _run_script(args)
    except SystemExit as error:
        if error.code not in (None, 0, _SAVED_CODE):  # the script itself says that it failed: do not wait
            sys.last_value = error
        raise
    except KeyboardInterrupt as error:
        _print(error)
        sys.exit(130)
    except BaseException as error:
        text = _print(error)
        if event_fd >= 0 and os.getpid() == pid:  # not from a child that the script forked
            _send_exception(event_fd, error, text, devices)
        sys.exit(1)
    finally:
        if os.getpid() == pid:
            hand_over(recorded, event_fd)


def _take_debugger(event_fd: int) -> None:
    """Do what --debug asks for: in its rank wait for a debugger, in all ranks wait for that one."""
    host = os.environ.pop("ZLAUNCH_DEBUG", "")
    if "ZLAUNCH_NO_TIMEOUTS" not in os.environ:
        return
    from zlaunch.node import debugger

    debugger.lift_timeouts()
    if host:
        debugger.await_client(host, event_fd)


def _bind(cpus: str) -> None:
    """Run on these CPUs alone; memory then comes from their NUMA node by itself."""
    from zlaunch.system.cores import parse_cpus

    try:
        os.sched_setaffinity(0, parse_cpus(cpus))
    except OSError as error:
        print(f"zlaunch: cannot bind to cores {cpus}: {error.strerror}", file=sys.stderr)


def _note_stop(_signum: int, _frame: object) -> None:
    """Leave a note for the runtime, which takes the signal over when it starts."""
    os.environ["ZLAUNCH_STOP_ASKED"] = "1"


def _own_event_fd() -> int:
    """Keep the event pipe for this process alone; -1 when there is none.

    A process that the script starts inherits the environment but not the descriptor. The number is high so
    that it meets no other file there when it tries to report.
    """
    given = int(os.environ.get("ZLAUNCH_EVENT_FD", "-1"))
    if given < 0:
        return -1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    floor = _EVENT_FD_FLOOR if limit < 0 else min(_EVENT_FD_FLOOR, limit // 2)
    own = fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, floor)
    os.close(given)
    os.environ["ZLAUNCH_EVENT_FD"] = str(own)
    return own


def _exec(args: list[str]) -> NoReturn:
    try:
        os.execvp(args[0], args)
    except OSError as error:
        print(f"zlaunch: cannot run {args[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _set_path(first: str) -> None:
    """Make sys.path what `python script.py` makes it: the script's folder instead of the current one."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        replaced = os.path.abspath(sys.path.pop(0))
        # From our own checkout the current folder was the only way to us; leave one, behind all others.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        if replaced == root and root not in sys.path:
            sys.path.append(root)
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, first)


def _choose_deepspeed() -> None:
    """Choose which package `import deepspeed` finds: --compat, or ZLAUNCH_COMPAT."""
    from zlaunch.compat.deepspeed import install_as_asked

    install_as_asked(os.environ.get("ZLAUNCH_COMPAT") or "auto")


def _watch_imports() -> None:
    """Prepare for libraries that the script may import."""
    from zlaunch.compat import trainer_metrics

    accelerate_state.watch()
    trainer_metrics.watch()


def _give_local_rank(script: bytes) -> None:
    """Give --local_rank to the script, of which this is the text, if it knows it."""
    if os.environ.pop(_PASSES, ""):
        value = os.environ["LOCAL_RANK"]
        spelling = local_rank_option.spelling_in(script)
        if spelling:
            sys.argv.insert(1, f"{spelling}={value}")
        local_rank_option.watch(value, is_passed=bool(spelling))


def _run_module(args: list[str]) -> None:
    sys.argv = args
    _set_path(os.getcwd())
    _choose_deepspeed()
    _watch_imports()
    _give_local_rank(_text_of_module(args[0]))
    # Private, but pdb uses it as well; runpy.run_module would take its __main__ away again.
    details = runpy._get_module_details(args[0])  # type: ignore[attr-defined]
    spec = details[1]
    code = details[2]
    args[0] = spec.origin
    _run_main(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _text_of_module(name: str) -> bytes:
    """Return the source text of what ``python -m`` runs, b"" where it cannot be found without running it."""
    places = [os.path.join(folder or os.curdir, *name.split(".")) for folder in sys.path]
    return _first_file(f"{place}{end}" for place in places for end in (".py", "/__main__.py"))


def _text_of_archive(path: str) -> bytes:
    """Return the source text of a folder's or a zip file's ``__main__.py``, b"" if it has none."""
    if os.path.isdir(path):
        return _first_file([os.path.join(path, "__main__.py")])
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read("__main__.py")
    except (OSError, KeyError, zipfile.BadZipFile):  # a .pyc, or what runpy will refuse
        return b""


def _first_file(paths: Iterable[str]) -> bytes:
    for path in paths:
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            continue
    return b""


def _run_script(args: list[str]) -> None:
    script = args[0]
    sys.argv = args
    _set_path(os.path.dirname(os.path.realpath(script)))
    _choose_deepspeed()
    _watch_imports()
    if os.path.isdir(script) or script.endswith((".zip", ".pyz", ".pyc")):
        _give_local_rank(_text_of_archive(script))
        runpy.run_path(script, run_name="__main__")
        return
    script = os.path.abspath(script)  # sys.argv[0] stays as it was given, as in Python itself
    with open(script, "rb") as file:
        text = file.read()
    _give_local_rank(text)
    code: CodeType = compile(text, script, "exec", dont_inherit=True)
    # __spec__ None and a __file__ is what multiprocessing's spawn looks at.
    _run_main(code, __file__=script, __cached__=None)


def _run_main(code: CodeType, **names: Any) -> None:
    """Run the code as ``__main__``, which stays until the very end, as threads, atexit functions and pickles
    of the script's classes expect.
    """
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, **names)
    sys.modules["__main__"] = module
    # Python, as it ends, clears the names of the modules that are still there. That closes the files which
    # the script has left open, and writes their buffers. A reference in `sys` lasts longer than any other.
    sys._zlaunch_script = module  # type: ignore[attr-defined]
    exec(code, module.__dict__)


def _print(error: BaseException) -> str:
    """Show the exception as Python itself would, without our frames; returns the traceback's text.

    That another rank has gone is one line: the cause is told by that rank, and must not scroll away.
    """
    stripped: TracebackType | None = error.__traceback__
    while stripped is not None and stripped.tb_frame.f_code.co_filename in _OUR_FILES:
        stripped = stripped.tb_next
    if isinstance(error, ZlaunchError):
        _end_in_user_code(stripped)
    error.__traceback__ = stripped
    left_out = shorten(error)
    text = left_out + "".join(traceback.format_exception(type(error), error, stripped))
    sys.last_type = type(error)
    sys.last_value = error
    sys.last_traceback = stripped
    short = "".join(traceback.format_exception_only(type(error), error)).strip()
    plain = sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch.distributed")
    if plain and "RANK" in os.environ and talk_of(error) == "lost":
        first = short.splitlines()[0]
        print(f"zlaunch: rank {os.environ['RANK']} has lost another rank: {first}", file=sys.stderr)
        return text
    print(left_out, end="", file=sys.stderr)
    sys.excepthook(type(error), error, stripped)
    return text


def _end_in_user_code(frames: TracebackType | None) -> None:
    """Leave out the frames behind the last one that is not ours: how we have found a mistake helps nobody."""
    last = None
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER):
            last = frames
        frames = frames.tb_next
    if last is not None:
        last.tb_next = None


def _send_exception(event_fd: int, error: BaseException, text: str, devices: str | None) -> None:
    """Tell the agent of an exception; `devices` are those that the script was started with."""
    import json

    event = {
        "type": "exception",
        "rank": int(os.environ.get("RANK", "0")),
        "time": time.time(),
        "exception": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "traceback": text[-_TRACEBACK_LIMIT_CHARS:],
        "talk": talk_of(error),
        "chose_devices": os.environ.get(_DEVICES) != devices,
    }
    try:
        os.write(event_fd, json.dumps(event).encode() + b"\n")
    except OSError:  # the agent is gone, so there is no one to tell
        pass


if __name__ == "__main__":
    # The target replaces sys.modules["__main__"]; this reference keeps our own globals alive until the end.
    _own_module = sys.modules["__main__"]
    main()
