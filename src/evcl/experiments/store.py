"""A store of results on disk, shared by any number of processes on any number of machines.

A cell is a configuration of one seed. Its folder is named by its key. What happens to a cell is recorded in files that
are created once and never changed or removed, so two processes can never both believe that they own it:

    DIR/sweeps/HASH.json            the list of cells to run
    DIR/owners/HOST-PID-RANDOM.json a process that runs cells; touched every HEARTBEAT_SECONDS, removed when it ends
    DIR/cells/KEY/claim-1.json      the owner that runs the cell
    DIR/cells/KEY/failed-1.json     why that attempt failed, if it did
    DIR/cells/KEY/claim-2.json      the owner that took over from a dead owner, or that retries after a failure
    DIR/cells/KEY/checkpoint/       the checkpoints of the unfinished cell; only this folder is changed and removed
    DIR/cells/KEY/result.json       the result, if the cell succeeded

The last claim counts. `write_once` creates it, so if several processes see the same stale claim, only one takes over.
If an owner was only suspended and comes back, `complete` tells it that there already is a result, and its own is
dropped. Its failure would be ignored, because its claim is no longer the last.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from evcl._core.bounds import MOST_STORE_BYTES
from evcl._core.errors import EvclError
from evcl._core.files import open_regular, read_text, write_once
from evcl.experiments.folder import FOLDER, describe, is_of
from evcl.experiments.reading import read_result
from evcl.experiments.result import CELLS, HIDDEN, RESULT, Result, to_json

if TYPE_CHECKING:
    from evcl.experiments.config import Config
    from evcl.training import Checkpoints

NUMBERS = 12  # the numerical version: increased whenever the same settings give different numbers
AGENTS_VERSION = 2  # that of agents on streams of environments, whose numbers change apart from the others
HEARTBEAT_SECONDS, MISSED_HEARTBEATS = 15.0, 8  # between an owner's heartbeats, and how many may be missed
LONGEST_BEAT = 3600.0  # seconds

About = Mapping[str, Any]  # what a list of cells says of a cell: see `describe`


@dataclass(frozen=True)
class Failure:
    """Why a cell failed; if it diverged, `result` holds its result, with the accuracy missing."""

    message: str
    result: Result | None = None


class _Declared(Struct):
    """A list of cells to run."""

    cells: list[dict[str, Any]]


class _Claimed(Struct):
    owner: str


T = TypeVar("T", Failure, _Claimed, _Declared)


@dataclass(frozen=True)
class Claim:
    """The right to run a cell: the cell's key, and the number of this claim."""

    key: str
    number: int


def key(config: Config) -> str:
    """The name of a run: identical exactly if the settings and the numerical version are identical."""
    agents = {"agents": AGENTS_VERSION} if "algorithm" in config.settings else {}
    return _hash({"numbers": NUMBERS, **agents, **describe(config)})


def _hash(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


# --- owners ---------------------------------------------------------------------------------------------------------


class Owner(Struct, frozen=True):
    """A process that runs cells: the contents of its file."""

    machine: str  # where its pid is valid: host, boot and PID namespace
    pid: int
    started: str  # its start time, so that a reused pid is not mistaken for it; "" if unknown
    beat: Annotated[float, Meta(gt=0, le=LONGEST_BEAT)]

    @classmethod
    def here(cls, beat: float) -> Owner:
        """This process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()), beat)

    def dead(self) -> bool:
        """Whether the process is known to have ended; for a process on another machine that is unknown, so False."""
        if self.machine != _machine() or os.name != "posix":
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # for example, the process belongs to another user
            pass
        return _started(self.pid) not in ("", self.started)


def _machine() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))  # containers may share a host's name but not its pids
    return " ".join(parts)


def _started(pid: int) -> str:
    """The start time of a process, in its machine's units; "" if unknown. A zombie counts as ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] == "Z" else fields[19]


class Heartbeats:
    """How long files have not changed, measured by this process's clock: clocks of two machines are never compared.

    Each check adds at most one beat, so that a suspended watcher does not mistake its own pause for the owner's.
    """

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, float, float]] = {}  # file -> (stamp, last check, seconds unchanged)

    def of(self, name: str, stamp: int, beat: float) -> float:
        now = time.monotonic()
        last, looked, silent = self.seen.get(name, (stamp, now, 0.0))
        silent = silent + min(now - looked, beat) if stamp == last else 0.0
        self.seen[name] = (stamp, now, silent)
        return silent


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellState:
    """The state of a cell: `todo`, `running`, `stale` (claimed, but its owner is gone), `failed` or `done`."""

    kind: str
    claims: int = 0
    owner: str = ""


class Store:
    """A folder of results shared by several processes. Run cells inside `with Store(folder) as store`."""

    def __init__(self, folder: Path, beat: float = HEARTBEAT_SECONDS) -> None:
        self.folder, self.beat = folder, beat
        self.me = ""  # the name of this process as an owner, from its first claim on
        self._silence = Heartbeats()
        self._ended = threading.Event()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        """Release unfinished claims at once, so that other processes can take them over."""
        self._ended.set()
        if self.me:
            with contextlib.suppress(OSError):
                self._owner_path(self.me).unlink()
        self.me, self._ended = "", threading.Event()  # it may be entered again, as another owner

    def cell(self, key: str) -> Path:
        return self.folder / CELLS / key

    def _owner_path(self, name: str) -> Path:
        return self.folder / "owners" / f"{name}.json"

    # --- what there is to do

    def declare(self, configs: Iterable[Config]) -> None:
        """Add cells to the list of cells to run; cells declared earlier stay."""
        each = [{"key": key(config), "preset": config.preset, **describe(config)} for config in configs]
        text = json.dumps({"schema": 1, "numbers": NUMBERS, "cells": each}, indent=0) + "\n"
        self._make(self.folder / "sweeps")
        write_once(self.folder / "sweeps" / f"{_hash(each)}.json", text)

    def declared(self) -> dict[str, About]:
        """All declared cells, by key."""
        cells: dict[str, About] = {}
        for path in sorted((self.folder / "sweeps").glob("*.json")):
            wrong = "is not a list of cells: remove it"
            for each in _read(path, _Declared, wrong).cells:
                if "key" not in each:
                    raise EvclError(f"{path} {wrong}")
                cells[each["key"]] = each
        return cells

    # --- one cell

    def look(self, key: str) -> CellState:
        """The state of a cell, from one check: a remote owner counts as gone if its heartbeat is old by our clock."""
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
        silent = owner is None or time.time() - stamp / 1e9 > MISSED_HEARTBEATS * owner.beat
        return CellState("stale" if owner is None or silent or owner.dead() else "running", last, name)

    def take(self, config: Config, retry: bool = False) -> Claim | Result | Failure | None:
        """Claim a cell. Returns the claim; or the cell's result or failure, if it has ended; or None while another
        process runs it.
        """
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
        self._register()
        if not write_once(folder / f"claim-{last + 1}.json", json.dumps({"owner": self.me}) + "\n"):
            return None
        if (folder / RESULT).exists():  # written after our check by an owner presumed dead
            return self.result(config)
        return Claim(name, last + 1)

    def complete(self, claim: Claim, result: Result) -> bool:
        """Store a result. Returns False if there already is one; this one is then dropped."""
        self._make(self.cell(claim.key))
        kept = write_once(self.cell(claim.key) / RESULT, to_json(result))
        self._saved(claim.key).remove()
        return kept

    def fail(self, claim: Claim, failure: Failure) -> None:
        """Store why a cell failed."""
        content = {"message": failure.message, "result": failure.result}
        self._make(self.cell(claim.key))
        write_once(self.cell(claim.key) / f"failed-{claim.number}.json", to_json(content))
        self._saved(claim.key).remove()

    def checkpoints(self, config: Config) -> Checkpoints | None:
        """The checkpoints of a cell: a process that takes the cell over resumes from them."""
        return self._saved(key(config))

    def _saved(self, key: str) -> Checkpoints:
        from evcl.training import Checkpoints  # imports torch, which evcl status does not need

        return Checkpoints(self.cell(key) / FOLDER, resume=True)

    def result(self, config: Config) -> Result:
        """Read a stored result, and check that it belongs to this configuration."""
        path = self.cell(key(config)) / RESULT
        result = read_result(path)
        if not is_of(result, config):
            raise EvclError(f"{path} is not the result of {config.name}: remove its folder to run it again")
        return replace(result, preset=config.preset)

    def score(self, key: str) -> tuple[str, float | None]:
        """What a finished cell is judged by, such as its average accuracy, and its value."""
        result = read_result(self.cell(key) / RESULT)
        return result.score, result.measure(result.score).mean

    def failure(self, key: str, number: int) -> Failure:
        return _read(self.cell(key) / f"failed-{number}.json", Failure)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove everything stored about these cells, so that they are run again."""
        for folder in map(self.cell, keys):
            away = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
            try:
                folder.rename(away)  # atomic: a half-removed folder must not look like a cell
                shutil.rmtree(away)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise EvclError(f"cannot remove {folder}: {error.strerror or error}") from error

    # --- who runs what

    def others(self) -> bool:
        """Whether another process has registered here and has not signed off."""
        return any(name != f"{self.me}.json" for name in _names(self.folder / "owners"))

    def _claimed_by(self, key: str, number: int) -> str:
        return _read(self.cell(key) / f"claim-{number}.json", _Claimed).owner

    def _owner(self, name: str) -> tuple[Owner | None, int]:
        """An owner (None if it has ended) and its last heartbeat, in nanoseconds of the file system's clock."""
        path = self._owner_path(name)
        try:
            with open_regular(path) as file:  # on a network file system, opening bypasses the cache
                owner = msgspec.json.decode(file.read(MOST_STORE_BYTES), type=Owner)
                return owner, os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, 0
        except (OSError, ValueError, RecursionError) as error:
            raise EvclError(f"{path} cannot be read: {error}") from error

    def _gone(self, name: str) -> bool:
        """Whether an owner has ended, or has missed MISSED_HEARTBEATS while we watched."""
        owner, stamp = self._owner(name)
        if owner is None or owner.dead():
            return True
        return self._silence.of(name, stamp, owner.beat) > MISSED_HEARTBEATS * owner.beat

    def _register(self) -> None:
        """Register this process as an owner, and start its heartbeat."""
        if self.me:
            return
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
        me = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._make(self.folder / "owners")
        write_once(self._owner_path(me), msgspec.json.encode(Owner.here(self.beat)).decode() + "\n")
        self.me = me
        threading.Thread(target=self._live, args=(self._owner_path(me), self._ended), daemon=True).start()

    def _live(self, path: Path, ended: threading.Event) -> None:
        while not ended.wait(self.beat):
            with contextlib.suppress(OSError):  # the folder may reappear; if not, writing the next result raises
                os.utime(path)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvclError(f"cannot write to {folder}: {error.strerror or error}") from error


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise EvclError(f"cannot read {folder}: {error.strerror or error}") from error


def _last(names: Iterable[str]) -> int:
    """The number of the last claim; 0 if there is none."""
    numbers = [name[6:-5] for name in names if name.startswith("claim-") and name.endswith(".json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _read(path: Path, kind: type[T], wrong: str = "") -> T:
    text = read_text(path, MOST_STORE_BYTES)
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        raise EvclError(f"{path} {wrong or f'cannot be read: {error}'}") from error


# --- where the cells of a folder stand -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A cell and its state; its average score if it is done, or the error message if it failed."""

    cell: About
    state: CellState
    score: float | None = None
    message: str = ""
    judged_by: str = "average_accuracy"  # what `score` is, one of SCORES


def standing(folder: Path) -> list[Standing]:
    """The state of every cell of a folder."""
    store = store_in(folder)
    standings = []
    for key, cell in store.declared().items():
        state = store.look(key)
        score, message, judged_by = None, "", "average_accuracy"
        if state.kind == "done":
            judged_by, score = store.score(key)
        elif state.kind == "failed":
            message = store.failure(key, state.claims).message
        standings.append(Standing(cell, state, score, message, judged_by))
    return standings


def store_in(folder: Path) -> Store:
    """The store in a folder: that of a sweep, or the hidden one of `reproduce` and `tune`."""
    for place in (folder, folder / HIDDEN):
        if (place / "sweeps").is_dir():
            return Store(place)
    raise EvclError(f"{folder} holds no sweep: make one with evcl sweep FILE.toml --out {folder}")


def varied(cells: Sequence[About]) -> list[str]:
    """The settings that differ between the cells that have them."""
    values: dict[str, set[object]] = {}
    for cell in cells:
        for name, value in cell["settings"].items():
            values.setdefault(name, set()).add(value)
    return [name for name, each in values.items() if len(each) > 1]
