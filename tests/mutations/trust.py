"""List mutations of what is trusted: folders of runs, calls and snapshots."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "runtime/trust.py",
        "    if writers and (entry is None or not entry.st_mode & _OTHERS_WRITE):\n",
        "    if writers and entry is None:\n",
        "a folder that everybody can write to is trusted",
        ("tests/unit/system/test_trust.py",),
    ),
    Mutation(
        "runtime/trust.py",
        "            if not _is_own(about):\n",
        "            if False:\n",
        "the link of another user is followed",
        ("tests/unit/system/test_trust.py",),
    ),
    Mutation(
        "runtime/trust.py",
        'return Path(f"/proc/self/fd/{self._fd}")',
        'return Path(os.readlink(f"/proc/self/fd/{self._fd}")).parent / "run"',
        "the path of a checked folder leads to what has its name by now",
        ("tests/unit/system/test_trust.py",),
    ),
    Mutation(
        "runtime/trust.py",
        "        return os.fstat(entry)\n",
        "        return os.stat(name, dir_fd=fd, follow_symlinks=False)\n",
        "a folder's owner passes for this user by what he puts in the place of the probe",
        ("tests/unit/system/test_trust.py",),
    ),
    Mutation(
        "zlaunch/supervisor/run_folder.py",
        "        with Folder(path.parent) as folder, folder.open(path.name) as file:\n",
        '        with open(path, "rb") as file:\n',
        "`zlaunch stop` kills what a forged record names",
        ("tests/unit/supervisor/test_foreign_runs.py",),
    ),
    Mutation(
        "zlaunch/queue/daemon.py",
        "        make_folder(path)  # of another user",
        "        path.mkdir(parents=True, exist_ok=True)  # of another user",
        "the jobs of another user's queue run with this user's rights",
        ("tests/unit/supervisor/test_foreign_runs.py",),
    ),
    Mutation(
        "zlaunch/jobs.py",
        "            check_folder(_call_folder(self.folder))\n",
        "            pass\n",
        "a function's results are read from a folder of another user",
        ("tests/e2e/test_trust.py",),
    ),
    Mutation(
        "zlaunch/system/machine.py",
        " and path.lstat().st_uid == os.geteuid()",
        "",
        "root removes the snapshots of other users",
        ("tests/unit/system/test_memory.py",),
    ),
    Mutation(
        "zlaunch/supervisor/git_state.py",
        "        os.killpg(process.pid, signal.SIGKILL)\n",
        "        process.kill()\n",
        "what a hanging git has started stays behind",
        ("tests/unit/supervisor/test_git_state.py",),
    ),
    Mutation(
        "zlaunch/supervisor/code_changes.py",
        "if _hash(Path(now.root, name)) != hashes[name]]",
        "if not _hash(Path(now.root, name))]",
        "a rerun does not see that an untracked file has changed",
        ("tests/unit/cli/test_rerun.py",),
    ),
    Mutation(
        "zlaunch/supervisor/file_hash.py",
        "            left -= size\n",
        "",
        "the untracked files of a run are hashed without a limit",
        ("tests/unit/supervisor/test_provenance.py",),
    ),
    Mutation(
        "zlaunch/supervisor/code_state.py",
        '    text, secrets = redact(script["text"], values)\n',
        '    text, secrets = script["text"], 0\n',
        "the copy of a script shows its secrets",
        ("tests/unit/supervisor/test_provenance.py",),
    ),
    Mutation(
        "zlaunch/node/agent.py",
        "        if self._all_exited():\n            self._stop_listing()\n",
        "",
        "the list of packages makes a run longer",
        ("tests/unit/node/test_packages.py",),
    ),
)
