"""Check that every wait of the launcher has an end, or a reason why it needs none."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "zlaunch"
_BLOCKING = {"get", "join", "wait", "acquire", "select", "recv", "communicate", "result", "waitpid", "run"}
_BOUNDED = {"timeout", "timeout_s"}
ENDS = {
    # (file, call): why it ends
    (
        "controller.py",
        "self.room.acquire",
    ): "a reader thread, which does not keep the process",
    ("controller.py", "thread.join"): "each thread's transports are closed and killed within 2 s each",
    (
        "watchdog.py",
        "os.waitpid",
    ): "the agent's end is what the watchdog is there for; the agent has limits itself",
    ("agent.py", "os.waitpid"): "WNOHANG",
    ("detach.py", "os.waitpid"): "its child only forks",
    ("ssh.py", "self._outgoing.get"): "a writer thread; closing the connection puts None",
    ("ssh.py", "self._channel.recv"): "a reader thread; keepalives and the heartbeat end the connection",
    ("preload.py", "connection.recv"): "the agent's end is the end of the file, and PDEATHSIG",
    ("preload.py", "self.connection.recv"): "MSG_DONTWAIT",
    ("network.py", "connection.recv"): "the socket has a timeout",
    ("arrival.py", "connection.recv"): "the socket has a timeout",
    ("reception.py", "caller.connection.recv"): "the socket does not block",
    ("agent.py", "self._selector.select"): "given in seconds",
    ("git_state.py", "selector.select"): "given in seconds",
    ("provenance.py", "self._helper.communicate"): "a thread of its own; the run's end kills the helper",
    ("console.py", "select.select"): "as a terminal that is halted: the signal handler stops the run",
    ("agent.py", "select.select"): "given in seconds",
    ("daemon.py", "select.select"): "given in seconds",
}


def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.append((ast.unparse(node.func), node))
    return found


def _may_wait_for_ever(name: str, call: ast.Call) -> bool:
    method = name.rpartition(".")[2]
    if method not in _BLOCKING or any(keyword.arg in _BOUNDED for keyword in call.keywords):
        return False
    if method == "get" and call.args:  # of a mapping
        return False
    if method == "join" and (call.args or "path" in name or name.startswith(("'", '"'))):
        return False
    if method in ("wait", "result") and call.args:
        return False
    return not (method == "run" and not name.startswith("subprocess"))


def test_every_wait_has_an_end() -> None:
    used = set()
    for folder in ("launchers", "node", "plan", "queue", "supervisor", "system", "transports", "view"):
        for path in sorted((ROOT / folder).glob("*.py")):
            for name, call in _calls(path):
                if _may_wait_for_ever(name, call):
                    key = path.name, name
                    assert key in ENDS, f"{path}:{call.lineno}: {name} has no timeout"
                    used.add(key)
    assert used == set(ENDS), "reasons for what is no longer there"
