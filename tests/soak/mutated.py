"""Changed files to everything that reads one: `python mutated.py COUNT SEED [TARGET...]`, a line of JSON a defect.

A reader may refuse a file with an EvclError, or take it. A defect is another exception, a warning, more than SECONDS,
more memory than twice what the file states and ALLOWANCE, or code that ran. `entries.py` lists the readers. Files that
once showed a defect are in `corpus/TARGET`, and come first.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "safety")]
from cost import forget, memory  # noqa: E402
from entries import TARGETS, Target  # noqa: E402
from mutations import MARK, mutated  # noqa: E402

from evcl._core.errors import EvclError  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 5.0  # of the processor: the machine may be busy
ALLOWANCE = 200_000_000  # bytes beside twice what a file states
PEAK = [0]  # the largest growth of memory so far, beside twice what the file states


class TooLong(BaseException):
    pass


def stop(*_: object) -> None:
    raise TooLong


FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
ran: list[str] = []
watching = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in FORBIDDEN:
        ran.append(event)


def attempt(target: Target, path: Path) -> str | None:
    """Read a file; what is wrong with how that went, or None."""
    global watching  # noqa: PLW0603
    wrong, stated = None, max(path.stat().st_size, target.most)
    forget()
    before, started, watching = memory("VmRSS"), time.process_time(), True
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(path)
    except EvclError as error:
        if len(str(error).splitlines()) != 1:
            wrong = f"not one line: {error}"
    except TooLong:
        wrong = "too long"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        watching = False
    grown = memory("VmHWM") - before
    PEAK[0] = max(PEAK[0], grown - 2 * stated)
    if wrong is None and grown > 2 * stated + ALLOWANCE:
        wrong = f"{grown / 2**20:.0f} MB of memory for {stated / 2**20:.1f} MB"
    if ran or MARK.exists():
        wrong = f"code ran: {ran}"
        ran.clear()
    if wrong is None and time.process_time() - started > SECONDS:
        wrong = "too long"
    return wrong


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def tried(name: str, target: Target, seed: int, most: int, seconds: float, keep: Path | None) -> int:
    """Give one entry point the corpus and `most` changed files, or fewer if the time is up; how many it was given."""
    with tempfile.TemporaryDirectory() as folder:
        path = target.make(Path(folder))
        good = path.read_bytes()
        for _ in range(2):  # what is imported or compiled at first is not the file's
            target.read(path)
        gc.collect()
        gc.freeze()  # the libraries: to look through all of them before each file takes longer than the file
        kept = sorted((CORPUS / name.replace(" ", "-").replace(",", "")).glob("*"))
        count, until = 0, time.monotonic() + seconds
        for k in range(-len(kept), most):
            if time.monotonic() > until:
                break
            body = kept[k].read_bytes() if k < 0 else mutated(good, random.Random(f"{seed} {name} {k}"))
            path.write_bytes(body)
            wrong = attempt(target, path)
            count += 1
            if wrong is not None:
                say(target=name, case=kept[k].name if k < 0 else k, wrong=wrong[:300])
                if keep is not None:
                    (keep / f"{name.replace(' ', '-')}-{seed}-{k}").write_bytes(body)
    return count


def main(count: int, seed: int, names: list[str], seconds: float = 1e9, keep: Path | None = None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, stop)
    sys.addaudithook(watch)
    chosen = {name: TARGETS[name] for name in names or TARGETS}
    taken, most = {}, 0
    for name, target in chosen.items():
        taken[name] = tried(name, target, seed, -(-count // len(chosen)), seconds / len(chosen), keep)
        most = max(most, PEAK[0])
    say(tried=sum(taken.values()), each=taken, most_megabytes=round(most / 1e6))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="files in all; the corpus comes first")
    parser.add_argument("seed", type=int)
    parser.add_argument("targets", nargs="*")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="stop after this time, shared among the targets, beside what making good files takes",
    )
    parser.add_argument("--keep", type=Path, help="a folder for the files that showed a defect")
    given = parser.parse_args()
    main(given.count, given.seed, given.targets, given.seconds, given.keep)
