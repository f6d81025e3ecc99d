# SPDX-License-Identifier: Apache-2.0
"""A serving loop on real text: continuous batching over a stack of short convolutions.

Every paragraph of a file is one request, every byte one token. A token goes through an embedding
and a stack of layers, each a ``CausalConv1dUpdate`` with SiLU and a scaled residual. The batch has
a fixed number of rows; a request holds a slot of the state pool while it runs and gives it back at
its end; rows without a request carry slot -1. One compiled plan serves every layer.

The requests run one at a time, then batched and eager, then batched with every step replayed from
one CUDA graph. Batching must not show: each request's outputs and final states have to equal, bit
for bit, those of running it alone. Without a GPU a smaller stack runs on the CPU, eager only::

    python examples/02_decode_loop.py --file book.txt --max-requests 200
"""

from __future__ import annotations

import argparse
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from cudnn_blocks import BadSlotError, CausalConv1dGeometry, TensorSpec
from cudnn_blocks.ops import CausalConv1dUpdate, check_status

Step = Callable[[], None]
OnDone = Callable[[int], None]

README = Path(__file__).resolve().parent.parent / "README.md"
VOCABULARY, WIDTH, STATE_LEN, PADDING = 256, 4, 4, -1
DTYPE, BITS = torch.bfloat16, torch.int16
RESIDUAL_SCALE = 0.75  # keeps activations near 1 over 36 layers; exact in BF16
# As many whole paragraphs as fit into max_tokens are served, unless --max-requests says how many.
DEFAULTS = {
    "cuda": {"channels": 8192, "layers": 36, "batch": 32, "max_tokens": 20_000},
    "cpu": {"channels": 128, "layers": 2, "batch": 8, "max_tokens": 6_000},
}


class Model:
    """Seeded weights, and the one plan that runs every layer, at any number of rows up to batch."""

    def __init__(self, sizes: argparse.Namespace, slots: int) -> None:
        channels, batch, device = sizes.channels, sizes.batch, torch.device(sizes.device)
        generator = torch.Generator().manual_seed(sizes.seed)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * std).to(device, DTYPE)

        def sample(*shape: int, dtype: torch.dtype = DTYPE) -> TensorSpec:
            return TensorSpec.contiguous(shape, dtype, device)

        self.embedding = normal(VOCABULARY, channels, std=1.0)
        self.weights = [normal(channels, WIDTH, std=0.5) for _ in range(sizes.layers)]
        self.plan = CausalConv1dUpdate(
            sample(batch, channels),
            sample(slots, channels, STATE_LEN),
            sample(channels, WIDTH),
            sample(batch, channels),
            CausalConv1dGeometry(channels, WIDTH, STATE_LEN),
            sample_conv_state_indices=sample(batch, dtype=torch.int32),
            activation="silu",
            on_bad_index="report",
        )
        self.plan.compile()


class SlotPool:
    """Free slots of the state pool; the one that has been free for longest goes first."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(reversed(range(num_slots)))

    def acquire(self) -> int:
        """Takes a slot, whatever it holds."""
        return self._free.popleft()

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        self._free.append(slot)


@dataclass(frozen=True)
class Result:
    """What a request leaves: final ``states [layers, D, L]``, last ``out [D]``, and ``digest [D]``.

    The digest is a hash, per channel, over the bits of the outputs of all tokens.
    """

    states: torch.Tensor
    out: torch.Tensor
    digest: torch.Tensor

    def problems(self, alone: Result) -> list[str]:
        """How it departs from what running the request alone leaves; empty where it does not."""
        a, b = vars(self), vars(alone)
        wrong = [f"{k} differs" for k in a if not torch.equal(a[k].view(BITS), b[k].view(BITS))]
        return wrong if torch.isfinite(self.out).all() else [*wrong, "out is not finite"]


class DecodeStack:
    """The buffers of ``rows`` batch rows and ``slots`` state slots, and one step over them."""

    def __init__(self, model: Model, rows: int, slots: int) -> None:
        device, channels = model.embedding.device, model.embedding.shape[1]
        self.model, self.rows, self.num_slots = model, rows, slots
        # An even number of slots keeps each layer's pool 16-byte aligned; NaN shows one not zeroed.
        shape = (len(model.weights), slots, channels, STATE_LEN)
        self.states = torch.full(shape, torch.nan, dtype=DTYPE, device=device)
        self.layers = list(zip(model.weights, self.states, strict=True))
        self.h = torch.zeros(rows, channels, dtype=DTYPE, device=device)
        self.y = torch.zeros_like(self.h)
        self.bits = self.h.view(BITS)
        self.digest = torch.zeros(rows, channels, dtype=torch.int32, device=device)
        self.status = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.feed = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self.tokens, self.slots = self.feed
        self.slots.fill_(PADDING)

    def step(self) -> None:
        """One token of every row. Nothing depends on the other rows, nor on how many there are."""
        embedding, plan = self.model.embedding, self.model.plan
        torch.index_select(embedding, 0, self.tokens, out=self.h)
        for weight, states in self.layers:
            plan.execute(self.h, states, weight, self.y, None, self.slots, status=self.status)
            self.h.add_(self.y).mul_(RESIDUAL_SCALE)
        self.digest.mul_(31).add_(self.bits)

    def capture(self) -> Step:
        """The step as one CUDA graph; replaying it reads whatever the buffers hold by then."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def set_feed(self, tokens: list[int], slots: list[int]) -> None:
        """Updates token ids and slots in place, with one copy that waits for nothing."""
        on_gpu = self.feed.is_cuda  # torch keeps the pinned source until the copy is done
        feed = torch.tensor([tokens, slots], dtype=torch.int32, pin_memory=on_gpu)
        self.feed.copy_(feed, non_blocking=on_gpu)

    def admit(self, row: int, slot: int) -> None:
        """A new request gets a zeroed state and an empty digest."""
        self.states[:, slot].zero_()
        self.digest[row].zero_()

    def result(self, row: int, slot: int) -> Result:
        """Copies what the request in ``row`` leaves behind."""
        return Result(self.states[:, slot].clone(), self.h[row].clone(), self.digest[row].clone())


@dataclass
class Running:
    """A request that holds a row and a slot."""

    request: int
    text: bytes
    slot: int
    position: int = 0


@dataclass
class Served:
    """One run over all requests."""

    results: dict[int, Result] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0


def serve(stack: DecodeStack, step: Step, requests: Sequence[bytes], on_done: OnDone) -> Served:
    """Serves every request with continuous batching; ``step`` is ``stack.step`` or its graph."""
    pool, waiting = SlotPool(stack.num_slots), deque(enumerate(requests))
    running: dict[int, Running] = {}
    served, start = Served(), time.perf_counter()
    while waiting or running:
        for row in range(stack.rows):
            if waiting and row not in running:
                running[row] = Running(*waiting.popleft(), slot=pool.acquire())
                stack.admit(row, running[row].slot)
        tokens, slots = [0] * stack.rows, [PADDING] * stack.rows
        for row, one in running.items():
            tokens[row], slots[row] = one.text[one.position], one.slot
        stack.set_feed(tokens, slots)
        step()
        served.steps += 1
        for row, one in list(running.items()):
            one.position += 1
            if one.position == len(one.text):
                served.results[one.request] = stack.result(row, one.slot)
                pool.release(one.slot)
                del running[row]
                on_done(len(one.text))
    check_status(stack.status)  # synchronises, so once per run: were all slots good, in every step?
    served.seconds = time.perf_counter() - start
    return served


def read_requests(options: argparse.Namespace) -> tuple[list[bytes], int]:
    """The paragraphs to serve, and how many the file has."""
    parts = re.split(rb"\r?\n\s*\n", Path(options.file).read_bytes())
    paragraphs = [part.strip() for part in parts if part.strip()]
    fitting = sum(end <= options.max_tokens for end in accumulate(map(len, paragraphs)))
    return paragraphs[: options.max_requests or max(fitting, 1)], len(paragraphs)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=argparse.SUPPRESS, help="the same as --file")
    parser.add_argument("--file", default=README, help="text to serve; default: the README")
    parser.add_argument("--device", choices=tuple(DEFAULTS), help="default: a GPU if there is one")
    for name in ("channels", "layers", "batch", "max-requests"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--check-only", action="store_true", help="print no timing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    defaults = DEFAULTS[options.device] | {"max_requests": None}
    for name in defaults:
        value = getattr(options, name, None)
        setattr(options, name, defaults[name] if value is None else value)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    try:
        options.requests, options.found = read_requests(options)
    except OSError as error:
        parser.error(f"--file: {error}")
    if not options.requests:
        parser.error(f"--file: {options.file} has no paragraph to serve")
    return options


def introduce(model: Model, options: argparse.Namespace) -> None:
    """Says what is about to run, and on what."""
    if options.device == "cpu":
        torch.set_num_threads(1)  # tensors this small only make threads wait for one another
        print("On the CPU: a small stack on the `reference` engine, eager only.")
    print(model.plan.describe())
    print(
        f"{Path(options.file).name}: {len(options.requests)} of {options.found} paragraphs, "
        f"{sum(map(len, options.requests))} tokens (bytes), {options.layers} layers of "
        f"{options.channels} channels, {options.batch} rows",
        flush=True,
    )


def conclude(runs: dict[str, Served], alone: Sequence[Result], options: argparse.Namespace) -> int:
    """Prints every mode's verdict and speed; 0 where every request came out as alone, else 1."""
    num_tokens, num_wrong = sum(map(len, options.requests)), 0
    for name, served in runs.items():
        problems = {i: served.results[i].problems(one) for i, one in enumerate(alone)}
        lines = [f"request {i}: {', '.join(wrong)}" for i, wrong in problems.items() if wrong]
        num_wrong += len(lines)
        equal = f"{len(alone) - len(lines)} of {len(alone)} requests bitwise equal to running alone"
        speed = f"; {num_tokens / served.seconds:,.0f} tokens/s in {served.steps} steps"
        print("\n  ".join([f"{name:<10}  {equal}{'' if options.check_only else speed}", *lines]))
    passed = "PASSED: every request left the outputs and states that it leaves alone; no bad slot"
    print("FAILED: a request did not come out as it does alone" if num_wrong else passed)
    return int(num_wrong > 0)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    requests, num_slots = options.requests, 2 * (options.batch * 5 // 8 + 1)
    model = Model(options, num_slots)
    stack, lone = DecodeStack(model, options.batch, num_slots), DecodeStack(model, 1, 2)
    introduce(model, options)
    stack.step()  # every row is padding yet: loads the kernels, touches no state
    modes = {"eager": stack.step}
    if options.device == "cuda":
        modes["CUDA graph"] = stack.capture()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress("{task.description:<10}", *columns, console=Console(stderr=True)) as progress:

        def bar(name: str) -> OnDone:
            return partial(progress.advance, progress.add_task(name, total=sum(map(len, requests))))

        try:
            done = bar("alone")
            alone = [serve(lone, lone.step, [text], done).results[0] for text in requests]
            runs = {name: serve(stack, step, requests, bar(name)) for name, step in modes.items()}
        except BadSlotError as error:
            print(f"FAILED: {error}")
            return 1
    return conclude(runs, alone, options)


if __name__ == "__main__":
    raise SystemExit(main())
