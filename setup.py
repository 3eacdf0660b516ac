"""Keeps the links inside zlaunch/ links in the source archive, which pyproject.toml cannot say."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class Sdist(sdist):
    """`sdist`, which else would put a second copy of the linked folders there."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files to ``base_dir``, and the links as links."""
        links = [path for path in Path("zlaunch").iterdir() if path.is_symlink()]
        behind = tuple(f"{link}/" for link in links)
        paths = {os.path.normpath(file) for file in files}  # with package-dir, some begin with "./"
        super().make_release_tree(base_dir, sorted(path for path in paths if not path.startswith(behind)))
        for link in links:
            os.symlink(os.readlink(link), Path(base_dir, link))


setup(cmdclass={"sdist": Sdist})
