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
        "zlaunch/cli/runs.py",
        "        check_folder(run.path)  # the process that a record names is signalled\n",
        "        pass\n",
        "`zlaunch stop` kills what a forged record names",
        ("tests/e2e/test_trust.py",),
    ),
    Mutation(
        "zlaunch/jobs.py",
        "            check_folder(self.folder)\n",
        "            pass\n",
        "a function's results are read from a folder of another user",
        ("tests/e2e/test_trust.py",),
    ),
    Mutation(
        "zlaunch/system/memory.py",
        " and path.lstat().st_uid == os.geteuid()",
        "",
        "root removes the snapshots of other users",
        ("tests/unit/system/test_memory.py",),
    ),
)
