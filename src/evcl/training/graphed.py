"""The steps of a fit on a GPU, captured as CUDA graphs and replayed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import DeviceNoise, Purpose, generator
from evcl.methods import Sampler, shuffled
from evcl.nn.chain import Batch
from evcl.training.data import Pool
from evcl.training.observer import Observer, Position
from evcl.training.optimise import resume_total, save_epoch
from evcl.training.step import Step


class Streams(threading.local):
    """Two CUDA streams per thread, created once. Torch has a pool of 32 streams and then reuses them, and work that
    another thread runs on a stream during capture would become part of the graph.
    """

    def __init__(self) -> None:
        self.run, self.capture = torch.cuda.Stream(), torch.cuda.Stream()


@cache
def streams() -> Streams:
    return Streams()


STEPS_PER_GRAPH = 10  # steps of linear layers in one graph, as the gap between two graphs takes as long as a kernel
# A capture must not overlap another thread's backward pass: autograd uses one thread per device for all threads.
capturing = threading.Lock()


class GraphedSteps:
    """On a GPU, captures steps as CUDA graphs and replays them; nothing waits for the host within an epoch.

    There are at most three graphs: for many full batches, for one, and for the last batch, which may be smaller. The
    order of the examples depends only on the seed. So does the noise, if kernels generate it (see `DeviceNoise`):
    replicas with the same seed get the same batches and noise, whichever other replicas train alongside.

    If several processes share the steps, the sums of their gradients are part of the graphs (`Ranks.capturable`). All
    processes capture and replay the same graphs in the same order. Call `release` before the processes part: a process
    group cannot be destroyed while a graph holds its sums.
    """

    def __init__(
        self,
        step: Step,
        pool: Pool,
        seeds: Sequence[int],
        number: int,
        observer: Observer,
        sampler: Sampler = shuffled,
        length: int | None = None,
    ) -> None:
        self.step, self.pool, self.seeds, self.number = step, pool, seeds, number
        self.observer, self.sampler = observer, sampler
        device = step.q.mean.device
        self.distinct = seeds if pool.own is not None else seeds[: period(seeds)]
        self.generator = generator(0, Purpose.GPU, device=device)
        keys = [generator(seed, Purpose.NOISE, number).initial_seed() for seed in self.distinct]
        self.noise = DeviceNoise(self.generator, torch.tensor(keys, device=device))
        self.total = torch.zeros(len(seeds), dtype=step.q.mean.dtype, device=device)
        length = len(pool) if length is None else length
        self.order = torch.zeros(len(self.distinct), length, dtype=torch.long, device=device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.memory = torch.cuda.graph_pool_handle()  # one for all graphs: they never run at the same time

    def epoch(self, epoch: int, batch: int, position: Position | None = None) -> Tensor:
        ranks = self.step.ranks
        if position is not None:  # checkpoints are only made at the end of an epoch
            return resume_total(self.total, position, ranks)
        self._draw_order(epoch, batch)  # before a capture, whose warm-up needs rows that a step can have
        full, rest = divmod(self.order.shape[1], batch)
        many = STEPS_PER_GRAPH if self.step.network.dense else 1  # other steps are long, and take long to capture
        plan = [((batch, many), full // many), ((batch, 1), full % many), ((rest, 1), int(rest > 0))]
        for (size, steps), times in plan:
            if times and (size, steps) not in self.graphs:
                count = self.step.update.count
                one = Batch(self.order, count, full + int(rest > 0), batch, size, self.total)
                self.graphs[size, steps] = self._capture(one, steps)
        key = ",".join(map(str, self.seeds))
        self.generator.manual_seed(generator(0, Purpose.GPU.of(key), self.number, epoch).initial_seed())
        self.total.zero_()
        for shape, times in plan:
            for _ in range(times):
                self.graphs[shape].replay()
        save_epoch(self.observer, ranks, epoch, full + int(rest > 0), self.total)
        return self.total

    def release(self) -> None:
        """Free the graphs."""
        while self.graphs:
            self.graphs.popitem()[1].reset()

    def _draw_order(self, epoch: int, batch: int) -> None:
        if self.sampler is shuffled:  # on the device
            keys = torch.empty(self.order.shape, device=self.total.device)
            for row, seed in zip(keys, self.distinct, strict=True):
                row.uniform_(generator=generator(seed, Purpose.ORDER, self.number, epoch, device=row.device))
            order = keys.argsort(dim=1, stable=True)
        else:
            sources = [generator(seed, Purpose.ORDER, self.number, epoch) for seed in self.distinct]
            order = torch.stack([self.sampler(self.pool.sizes, batch, source) for source in sources])
        self.order.copy_(self.pool.places(order))

    def _capture(self, batch: Batch, steps: int) -> torch.cuda.CUDAGraph:
        try:
            with capturing:
                return self._capture_alone(batch, steps)
        except RuntimeError as error:
            raise EvclError(
                "the step cannot be captured as a CUDA graph: a network, layer, term or loss must not wait for the "
                "device (.item(), boolean indexing); if it has to, use Fit(capture=False) in the method "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _capture_alone(self, batch: Batch, steps: int) -> torch.cuda.CUDAGraph:
        buffers = self.step.buffers()
        kept = [buffer.clone() for buffer in buffers]

        def once() -> None:
            if self.step.by_kernels:
                self.step(batch, self.noise)
            else:
                self.total.add_(self.step(batch.rows(), self.noise), alpha=batch.size)

        def go_back() -> None:
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

        # Warm up, so that allocations and choices of the first calls, also with a size, stay out of the graph.
        sizes = {size for size, _ in self.graphs}
        stream = streams().capture
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.stream(stream):
            for _ in range(0 if batch.size in sizes else 1 if sizes else 3):
                once()
                go_back()
            # Not torch.cuda.graph: it waits for the work of all threads, which may have a whole task under way.
            graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
            try:
                for _ in range(steps):
                    once()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


def period(seeds: Sequence[int]) -> int:
    """The length of the shortest prefix whose repetition gives the seeds."""
    count = len(seeds)
    return next(v for v in range(1, count + 1) if count % v == 0 and list(seeds[:v]) * (count // v) == list(seeds))
