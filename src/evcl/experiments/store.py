"""Results on disk that any number of processes, on any number of machines, fill together.

A cell is a configuration of one seed. Its folder is named by its key, and what happens to it is files that are made
once and never changed or removed, so that there is no moment at which two processes can both be right:

    DIR/sweeps/HASH.json            what cells there are to be
    DIR/owners/HOST-PID-RANDOM.json a process that runs some; touched every BEAT seconds, removed when it ends
    DIR/cells/KEY/claim-1.json      who runs the cell
    DIR/cells/KEY/failed-1.json     how that ended, if badly
    DIR/cells/KEY/claim-2.json      who took it over from an owner that was gone, or tries again what failed
    DIR/cells/KEY/checkpoint/       where it saves itself until then; this alone is changed and removed
    DIR/cells/KEY/result.json       how it ended, if well

The last claim counts. It is made by `write_once`, so of several who see the same stale claim one takes it over. An
owner that only slept and comes back hears from `complete` that a result is there already, and its own is dropped; its
failure counts for nothing, since its claim is not the last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from evcl._core.errors import EvclError
from evcl._core.files import open_regular, parsed, read_text, write_once
from evcl.experiments.folder import is_of
from evcl.experiments.result import RESULT, Result, read_result, to_json
from evcl.experiments.resume import FOLDER, describe

if TYPE_CHECKING:
    from evcl.experiments.run import Config
    from evcl.training import Checkpoints

NUMBERS = 3  # the numerical version: raised when the same settings give other numbers
BEAT, MISSED = 15.0, 8  # seconds between an owner's signs of life, and how many may be missed
MOST_BYTES = 256_000_000  # of a file: a list of 100,000 cells has a quarter of that
CELLS = "cells"
HIDDEN = ".cells"  # where `reproduce` and `tune` keep their cells, beside their results


@dataclass(frozen=True)
class Failure:
    """How a cell ended badly; `result` is that of a loss that was lost."""

    message: str
    result: Result | None = None


@dataclass(frozen=True)
class Claim:
    """The right to run a cell: its key, and which of its claims this is."""

    key: str
    number: int


def key(config: Config) -> str:
    """The name of a run: the same for the same settings in the same numerical version, and else another."""
    return _hash({"numbers": NUMBERS, **describe(config)})


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


# --- owners ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """A process that runs cells."""

    name: str
    machine: str  # where its number means something: host, boot and name space
    pid: int
    started: str  # when, so that a number that is used again is not taken for it; "" where that is not known
    beat: float

    @property
    def here(self) -> bool:
        return self.machine == _machine()

    def dead(self) -> bool:
        """Whether the process is known to have ended; of another machine's nothing is known."""
        if not self.here or os.name != "posix":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # another user's, say
            pass
        return _started(self.pid) not in ("", self.started)


def _machine() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))  # containers may share a host's name, not its processes
    return " ".join(parts)


def _started(pid: int) -> str:
    """When a process started, as its machine counts; "" where that is not told. A zombie has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] == "Z" else fields[19]


class Heartbeats:
    """For how long files have not changed, by a clock of one's own: the clocks of two machines are never compared.

    A look adds at most a beat, so that a watcher who slept does not take its own sleep for the other's silence.
    """

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, float, float]] = {}  # what changed last, when looked at, silent since

    def of(self, name: str, stamp: int, beat: float) -> float:
        now = time.monotonic()
        last, looked, silent = self.seen.get(name, (stamp, now, 0.0))
        silent = silent + min(now - looked, beat) if stamp == last else 0.0
        self.seen[name] = (stamp, now, silent)
        return silent


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellState:
    """Where a cell stands: `todo`, `running`, `stale` (claimed, and its owner gone), `failed` or `done`."""

    kind: str
    claims: int = 0
    owner: str = ""


class Store:
    """A folder of results that is shared with others; `with Store(folder) as store` while cells are run."""

    def __init__(self, folder: Path, beat: float = BEAT) -> None:
        self.folder, self.beat = folder, beat
        self.me: Owner | None = None  # from the first claim on
        self._silence = Heartbeats()
        self._ended = threading.Event()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is claimed and not done to the others, at once."""
        self._ended.set()
        if self.me is not None:
            with contextlib.suppress(OSError):
                self._owner_path(self.me.name).unlink()
        self.me, self._ended = None, threading.Event()  # it may be opened again, as another owner

    def cell(self, key: str) -> Path:
        return self.folder / CELLS / key

    def _owner_path(self, name: str) -> Path:
        return self.folder / "owners" / f"{name}.json"

    # --- what there is to do

    def declare(self, configs: Iterable[Config]) -> None:
        """Say what cells there are to be; those of earlier times stay."""
        each = [{"key": key(config), "preset": config.preset, **describe(config)} for config in configs]
        text = json.dumps({"schema": 1, "numbers": NUMBERS, "cells": each}, indent=0) + "\n"
        self._make(self.folder / "sweeps")
        write_once(self.folder / "sweeps" / f"{_hash(each)}.json", text)

    def declared(self) -> dict[str, dict[str, Any]]:
        """What cells there are to be, by their keys."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.folder / "sweeps").glob("*.json")):
            content = _read(path)
            try:
                found |= {str(each["key"]): dict(each) for each in content["cells"]}
            except (KeyError, TypeError, ValueError) as error:
                raise EvclError(f"{path} is not a list of cells: remove it") from error
        return found

    # --- one cell

    def look(self, key: str) -> CellState:
        """Where a cell stands, by one look: an owner elsewhere is gone if its last sign is old, by our clock."""
        names = _names(self.cell(key))
        last = _last(names)
        if RESULT in names:
            return CellState("done", last)
        if last == 0:
            return CellState("todo")
        name = self._claimed_by(key, last)
        if f"failed-{last}.json" in names:
            return CellState("failed", last, name)
        owner, stamp = self._owner(name)
        silent = owner is None or time.time() - stamp / 1e9 > MISSED * owner.beat
        return CellState("stale" if owner is None or silent or owner.dead() else "running", last, name)

    def take(self, config: Config, retry: bool = False) -> Claim | Result | Failure | None:
        """The right to run a cell; or how it ended already; or None while another runs it."""
        name = key(config)
        folder = self.cell(name)
        names = _names(folder)
        last = _last(names)
        if RESULT in names:
            return self.result(config)
        if f"failed-{last}.json" in names and not retry:
            return self.failure(name, last)
        if last and f"failed-{last}.json" not in names and not self._gone(self._claimed_by(name, last)):
            return None
        self._make(folder)
        claim = {"owner": self._register().name}
        if not write_once(folder / f"claim-{last + 1}.json", json.dumps(claim) + "\n"):
            return None
        if (folder / RESULT).exists():  # of one who was taken for gone, between our look and our claim
            return self.result(config)
        return Claim(name, last + 1)

    def complete(self, claim: Claim, result: Result) -> bool:
        """Keep a result; False if there is one already: then this one is dropped."""
        self._make(self.cell(claim.key))
        kept = write_once(self.cell(claim.key) / RESULT, to_json(result))
        self._saved(claim.key).remove()
        return kept

    def fail(self, claim: Claim, failure: Failure) -> None:
        """Keep how a cell failed."""
        content = {"message": failure.message, "result": failure.result}
        self._make(self.cell(claim.key))
        write_once(self.cell(claim.key) / f"failed-{claim.number}.json", to_json(content))
        self._saved(claim.key).remove()

    def checkpoints(self, config: Config) -> Checkpoints | None:
        """Where a cell saves itself on its way: whoever takes it over goes on from there."""
        return self._saved(key(config))

    def _saved(self, key: str) -> Checkpoints:
        from evcl.training import Checkpoints  # and torch, which evcl status does without

        return Checkpoints(self.cell(key) / FOLDER, resume=True)

    def result(self, config: Config) -> Result:
        """A result that is there, checked to be of this configuration."""
        path = self.cell(key(config)) / RESULT
        found = read_result(path)
        if not is_of(found, config):
            raise EvclError(f"{path} is not the result of {config.name}: remove its folder to run it again")
        return replace(found, preset=config.preset)

    def accuracy(self, key: str) -> float | None:
        """The average accuracy of a cell that is done."""
        return read_result(self.cell(key) / RESULT).average_accuracy.mean

    def failure(self, key: str, number: int) -> Failure:
        path = self.cell(key) / f"failed-{number}.json"
        try:
            return msgspec.json.decode(read_text(path, MOST_BYTES), type=Failure)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EvclError(f"{path} cannot be read: {error}") from error

    def forget(self, keys: Iterable[str]) -> None:
        """Remove what there is of cells, so that they are run again."""
        for folder in map(self.cell, keys):
            away = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
            try:
                folder.rename(away)  # at once: what is half removed is no cell
                shutil.rmtree(away)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise EvclError(f"cannot remove {folder}: {error.strerror or error}") from error

    # --- who runs what

    def others(self) -> bool:
        """Whether some other process has been at work here and has not said that it ended."""
        return any(self.me is None or name != f"{self.me.name}.json" for name in _names(self.folder / "owners"))

    def _claimed_by(self, key: str, number: int) -> str:
        return str(_read(self.cell(key) / f"claim-{number}.json").get("owner"))

    def _owner(self, name: str) -> tuple[Owner | None, int]:
        """An owner and its last sign of life, in ns of the file system's clock; None if it has ended."""
        try:
            with open_regular(self._owner_path(name)) as file:  # opening asks the server, not a cache
                content, stamp = parsed(file.read(MOST_BYTES).decode()), os.fstat(file.fileno()).st_mtime_ns
            machine, pid, started = str(content["machine"]), int(content["pid"]), str(content["started"])
            return Owner(name, machine, pid, started, float(content["beat"])), stamp
        except FileNotFoundError:
            return None, 0
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise EvclError(f"{self._owner_path(name)} cannot be read: {error}") from error

    def _gone(self, name: str) -> bool:
        """Whether an owner has ended, or has given no sign of life for MISSED beats while we watched."""
        owner, stamp = self._owner(name)
        if owner is None or owner.dead():
            return True
        return self._silence.of(name, stamp, owner.beat) > MISSED * owner.beat

    def _register(self) -> Owner:
        """This process among the owners; its signs of life begin."""
        if self.me is None:
            host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
            name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
            me = Owner(name, _machine(), os.getpid(), _started(os.getpid()), self.beat)
            self._make(self.folder / "owners")
            content = {"machine": me.machine, "pid": me.pid, "started": me.started, "beat": me.beat}
            write_once(self._owner_path(name), json.dumps(content) + "\n")
            self.me = me
            threading.Thread(target=self._live, args=(self._owner_path(name), self._ended), daemon=True).start()
        return self.me

    def _live(self, path: Path, ended: threading.Event) -> None:
        while not ended.wait(self.beat):
            with contextlib.suppress(OSError):  # the folder may come back; if not, the next result says so
                os.utime(path)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvclError(f"cannot write to {folder}: {error.strerror or error}") from error


class NullStore(Store):
    """A store that keeps nothing: every cell is to be run, here and now. Its checkpoints, if any, are the caller's."""

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        super().__init__(Path())
        self._given = checkpoints

    def checkpoints(self, config: Config) -> Checkpoints | None:
        return self._given

    def look(self, key: str) -> CellState:
        return CellState("todo")

    def take(self, config: Config, retry: bool = False) -> Claim:
        return Claim(key(config), 1)

    def complete(self, claim: Claim, result: Result) -> bool:
        return True

    def fail(self, claim: Claim, failure: Failure) -> None:
        pass

    def others(self) -> bool:
        return False


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise EvclError(f"cannot read {folder}: {error.strerror or error}") from error


def _last(names: Iterable[str]) -> int:
    """The number of the last claim, 0 if there is none."""
    numbers = [name[6:-5] for name in names if name.startswith("claim-") and name.endswith(".json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path, MOST_BYTES)
    try:
        return dict(parsed(text))
    except (ValueError, TypeError) as error:
        raise EvclError(f"{path} cannot be read: {error}") from error
