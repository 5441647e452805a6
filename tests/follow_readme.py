"""Follow README.md, and nothing else, in an empty folder: from nothing to a model of a CSV file, saved and used again.

    python tests/follow_readme.py            # installs the checkout with everything it needs, which may download torch
    python tests/follow_readme.py --lent     # without a network: the packages of this Python are lent to the new one

It takes the first command that installs, every piece of Python and every command `evcl`, in the order of the page, and
prints how long each took. Only the name of the package is changed: the checkout takes the place of a release.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as make sets it: beside other work, two threads wait for each other


class Done(NamedTuple):
    """A command of the page, in words, and how many seconds it took."""

    what: str
    seconds: float


def steps() -> list[tuple[str, str]]:
    """("sh", a command) or ("python", a program), in the order of the page: one installation, then everything else."""
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    found: list[tuple[str, str]] = []
    for language, block in blocks:
        if language == "python":
            found.append((language, block))
        for line in block.splitlines() if language == "sh" else ():
            if line.startswith("evcl ") or (line.startswith("pip ") and not found):
                found.append((language, line))
    return found


def lend(environment: Path) -> None:
    """Let a new environment use the packages of this one, and evcl of the checkout, as an installation would."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "lent.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    script = environment / "bin" / "evcl"
    script.write_text(f"#!{environment / 'bin' / 'python'}\nfrom evcl.cli import main\nmain()\n")
    script.chmod(0o755)


def follow(folder: Path, *, lent: bool) -> list[Done]:
    """Run it all in `folder`, and return what was done. An error of a command is raised."""
    environment = folder / "environment"
    pip = [] if lent else ["--upgrade-deps"]
    subprocess.run([sys.executable, "-m", "venv", *(["--without-pip"] if lent else pip), environment], check=True)
    done = []
    for language, step in steps():
        start = time.perf_counter()
        if language == "python":
            what, command = "a piece of Python", [environment / "bin" / "python", "-c", step]
        else:
            what = step.partition("  ")[0]
            program, *arguments = shlex.split(step, comments=True)
            arguments = [argument.replace("evcl[", f"{ROOT}[") for argument in arguments]
            command = [environment / "bin" / program, *arguments]
        if lent and what.startswith("pip "):
            lend(environment)
        else:
            subprocess.run(command, cwd=folder, check=True, capture_output=lent, env=os.environ | ONE_THREAD)
        done.append(Done(what, time.perf_counter() - start))
    return done


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = follow(Path(folder), lent="--lent" in sys.argv)
    for what, seconds in done:
        print(f"{seconds:6.1f} s  {what}")  # noqa: T201
    print(f"{sum(one.seconds for one in done):6.1f} s  {len(done)} commands")  # noqa: T201


if __name__ == "__main__":
    main()
