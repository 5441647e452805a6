"""Run programs as tasks on a Ray cluster (the extra `ray`). Ray places them, and retries them when a worker dies."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from evcl._core.errors import EvclError, extra
from evcl.experiments.config import Config
from evcl.experiments.engines import RETRIES, Died, OnEvent, Outcome, cores, portable
from evcl.experiments.plugins import load_plugins
from evcl.experiments.run import REPLICAS, execute_together
from evcl.training import Checkpoints, matmul_precision, streams

PASSED_ON = ("EVCL_PLUGINS", "EVCL_CACHE", "EVCL_DATA", "EVCL_OFFLINE", "EVCL_NATIVE")  # sent to the nodes


def connect(address: str | None, workers: int | None = None) -> None:
    """Join a cluster, or start one on this machine."""
    with extra("ray", "--engine ray needs Ray"):
        import ray
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; silences its warning
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"address": "local", "include_dashboard": False, "num_cpus": workers or cores()}
    else:
        options["address"] = address
    try:
        _reach(address)
        ray.init(**options)
    except (OSError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise EvclError(f"Ray cannot be used at {address or 'this machine'}: {why}") from None


def _reach(address: str | None) -> None:
    """Check that something listens at HOST:PORT, because Ray itself would wait for many minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon:
        if not (port.isascii() and port.isdecimal() and int(port) < 65536):
            raise ValueError("--address must be HOST:PORT, ray://HOST:PORT or auto")
        socket.create_connection((host, int(port)), timeout=10).close()


def device_of_cluster() -> str:
    """cuda if the cluster has GPUs, else cpu."""
    return "cuda" if _resources("GPU") > 0 else "cpu"


def _resources(kind: str) -> int:
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get(kind, 0))


def _run(cells: Sequence[Config], checkpoints: Checkpoints | None, variables: Mapping[str, str]) -> Outcome:
    """A Ray task. An error in a cell is returned as its outcome; Ray handles only the death of a worker."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    if checkpoints is not None and not checkpoints.folder.parent.is_dir():  # the store is not visible from this node
        checkpoints = None
    try:
        load_plugins()
        if cells[0].device == "cpu":
            return execute_together(cells, allow_divergence=True, checkpoints=checkpoints)
        with matmul_precision(cells[0].precision), torch.cuda.stream(streams().run):
            return execute_together(cells, allow_divergence=True, checkpoints=checkpoints)
    except Exception as error:
        return portable(error)


class Ray:
    """Ray tasks with one core each and, on GPUs, one GPU each. There are no events: only the outcome is reported."""

    def __init__(self, device: str, on_event: OnEvent) -> None:
        import ray

        self.ray = ray
        self.replicas = 1 if device == "cpu" else REPLICAS
        self.kind = "CPU" if device == "cpu" else "GPU"
        gpus = 0 if device == "cpu" else 1
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, max_calls=0)(_run)
        self.variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self.pending: dict[Any, int] = {}

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Say in one line that the cluster's head is lost. Cells that have ended are in the store."""
        try:
            yield
        except (self.ray.exceptions.RayError, OSError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise EvclError(
                f"the Ray cluster cannot be reached any more ({why}): give the same command again when it can, or with "
                "--engine local; cells that have ended are kept"
            ) from None

    def free(self) -> int:
        """Includes a few programs beyond the cluster's capacity, so that a node that joins can start at once."""
        with self._reached():
            room = _resources(self.kind)
        return max(room + max(room // 4, 2) - len(self.pending), 0)

    def start(self, number: int, cells: Sequence[Config], checkpoints: Checkpoints | None = None) -> None:
        with self._reached():
            self.pending[self.task.remote(list(cells), checkpoints, self.variables)] = number

    def ended(self, timeout: float) -> list[tuple[int, Outcome]]:
        if not self.pending:
            time.sleep(timeout)
            return []
        with self._reached():
            done, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=timeout)
        return [(self.pending.pop(ref), self._outcome(ref)) for ref in done]

    def _outcome(self, ref: Any) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(ref)
            return outcome
        except self.ray.exceptions.RayError as error:
            first = str(error).strip().partition("\n")[0]
            return Died(f"Ray gave up after {RETRIES + 1} attempts: {type(error).__name__}: {first}")

    def close(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError, OSError, RuntimeError):  # the head may be lost
            for ref in self.pending:
                self.ray.cancel(ref, force=True)
        self.pending = {}
