"""A strategy for each length against the best single one: an 8B decoder on 64 simulated H100.

    python benchmarks/shape_strategies.py

Documents have long-tailed lengths: a lognormal distribution with a median of 1,024 tokens and a sigma of 1.5,
cut at 524,288 tokens, and at 131,072. They are packed into rows of 8,192, 32,768, 131,072 or 524,288 tokens,
by the shortest row that a document fits in, and every step trains on 2 million tokens in rows of one length.
So the share of the steps with rows of a length is the share of all tokens that lie in its documents. A row
costs what one document of its length costs, under every strategy.

A strategy is a degree of tensor and of context parallelism with a kind of attention, the microbatches, and
how much of the layers is recomputed, all under ZeRO-3 over 64 devices. All degrees that can slice the longest
rows are tried for them with all layers recomputed; those that fit also with half and with nothing recomputed.
What fits is tried for all lengths, and is what a single strategy can be. Those for shorter rows alone are
tried in addition.

Where the strategies of two lengths hold parameters differently, the state moves when a step switches. The
move is planned, proven and simulated, and counts as often as two lengths follow each other that are drawn at
random. Two layers are captured, and repeated. Nothing is measured: `piper simulate` prices each step, and the
memory of a device limits it.
"""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import piper
from piper.checkpoint.moves import moving_plans
from piper.directives import Directive, apply
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.lower.buckets import make_buckets
from piper.lower.lower import LOWERING, first_state
from piper.lower.state import Settings
from piper.lower.validate import validate
from piper.models import decoder
from piper.models.layers import rope
from piper.plan.bucket import Bucket
from piper.process.gc_pause import no_collection
from piper.simulate.account import communicators_of
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate

sys.path.append(str(Path(__file__).parent))
from repeated import repeated

DEVICES, CLUSTER = 64, "h100"
LAYERS, VOCAB, DIM, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 128_256, 4096, 14_336, 32, 8, 128
LENGTHS = (8192, 32_768, 131_072, 524_288)
TOKENS = 2**21  # of a step
MEDIAN, SIGMA = 1024, 1.5  # of the documents' lengths
FIELDS = {"tokens": 1, "labels": 1}
STATE_BYTES = 8  # of an element: two moments in float32
SHOWN = 5  # single strategies


def shares(lengths: Sequence[int]) -> dict[int, float]:
    """Return the share of all tokens that lie in documents of each row length; longer ones are left out.

    Weighted by tokens, lognormal lengths are lognormal with the same sigma around another median.
    """

    def below(length: float) -> float:
        return 0.5 * (1 + math.erf((math.log(length / MEDIAN) - SIGMA**2) / SIGMA / math.sqrt(2)))

    whole = below(lengths[-1])
    ends = [0.0, *(below(length) / whole for length in lengths)]
    return {length: high - low for length, low, high in zip(lengths, ends, ends[1:], strict=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy: how many devices share a sequence and how they attend, microbatches and recomputation."""

    within: int  # devices over which ZeRO-3 shards; such groups hold the same
    tensor: int = 1
    context: int = 1
    attention: str = ""
    microbatches: int = 1
    saved: float = 1.0  # of what layers save for the backward; the rest is computed again

    @property
    def layout(self) -> tuple[int, int]:
        """Return what decides where parameters lie. Strategies with the same can follow each other."""
        return self.within, self.tensor

    @property
    def group(self) -> int:
        """Return how many devices share their samples."""
        return self.tensor * self.context

    @property
    def name(self) -> str:
        degrees = [f"DP{DEVICES // self.group}"]
        degrees += [f"TP{self.tensor}"] if self.tensor > 1 else []
        degrees += [f"CP{self.context} {self.attention}"] if self.context > 1 else []
        saved = {1.0: "", 0.5: ", half saved", 0.0: ", layers again"}[self.saved]
        parts = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        return f"{' x '.join(degrees)}, ZeRO-3 in {self.within}, {parts}{saved}"

    def rows(self, length: int) -> int:
        """Return the rows of a microbatch that a group of devices gets. 0: a row is too long."""
        return TOKENS // self.microbatches // (DEVICES // self.group) // length

    def directives(self, devices: range, layers: int, microbatches: int) -> list[Directive]:
        """Return the strategy on some devices, for a model of so many layers."""
        strategy: list[Directive] = []
        if self.within:
            inside = self.within if self.within < len(devices) else None
            strategy.append(piper.replicate(piper.at(), devices, zero=3, within=inside))
        if self.tensor > 1:
            weights = decoder.SHARDED_WEIGHTS
            strategy.append(
                piper.shard(piper.at(), devices, ways=self.tensor, axis="TP", weights=weights, between=1)
            )
        if self.context > 1:
            strategy.append(
                piper.shard(
                    piper.at(), devices, ways=self.context, axis="CP", batch=FIELDS,
                    attention=self.attention, balance="zigzag",
                )
            )  # fmt: skip
        if self.saved < 1:
            layer = piper.at(LAYER=range(1, layers + 1))
            across = "LAYER" if self.saved == 0 else None
            strategy.append(piper.remat(layer, budget=self.saved, across=across))
        if microbatches > 1:
            strategy.append(piper.split(piper.at(), parts=microbatches))
        return strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A simulated step."""

    seconds: float
    peak: float  # GiB of the fullest device
    fits: bool
    exposed: float  # of the step: communication that computing does not hide
    buckets: Mapping[str, Bucket]


class Decoder(nn.Module):
    """Tokens to logits: the embedding, each of two layers and the head are regions LAYER."""

    def __init__(self) -> None:
        super().__init__()
        config = decoder.Config(
            vocab=VOCAB, dim=DIM, layers=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, hidden=HIDDEN
        )
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(decoder.block(config) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("LAYER"):
            x = self.embedding(tokens)
        for layer in self.layers:
            with piper.annotate("LAYER"):
                x = layer(x, rope(tokens.shape[1], HEAD_DIM, 500_000.0, like=x))
        with piper.annotate("LAYER"):
            logits: Tensor = self.head(self.norm(x))
        return logits


def captured(choice: Choice, length: int) -> CapturedModel:
    """Capture two layers for one group of devices, and repeat the second."""
    tokens = torch.zeros(1, length, dtype=torch.long).expand(choice.rows(length), length)
    devices = range(choice.group)
    job = piper.Job(
        model=Decoder,
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=choice.directives(devices, 2, 1),
        optimizer=lambda params: torch.optim.AdamW(params, fused=True),
        precision="bf16",
    )
    return repeated(piper.compile(job, device="cpu", compile=True).outline, LAYERS)


def planned(choice: Choice, length: int) -> Step:
    """Plan and simulate a step with rows of one length."""
    outline = captured(replace(choice, within=0), length)
    strategy = choice.directives(range(DEVICES), LAYERS, choice.microbatches)
    graph = validate(apply(start(outline), strategy), TOKENS // length)
    buckets = make_buckets(graph)
    state = first_state(graph, Settings(state_bytes=STATE_BYTES), buckets)
    with no_collection():
        for rewrite, _ in LOWERING:
            state = rewrite(state)
    assert state.plans is not None
    cluster = load_cluster(CLUSTER)
    step = simulate(state.plans, outline, Roofline(cluster))
    (plan,), peak = state.plans, max(memory.peak for memory in step.memories)
    return Step(
        seconds=step.step,
        peak=peak / 2**30,
        fits=peak <= cluster.usable(communicators_of(plan)),
        exposed=step.mean[1] / step.step,
        buckets=buckets.read,
    )


DEGREES = (1, 2, 4, 8, 16, 32, 64)
Steps = Mapping[tuple[Choice, int], Step]
Moves = Mapping[tuple[tuple[int, int], tuple[int, int]], float]  # the seconds between two layouts


def for_longest() -> list[Choice]:
    """Return every degree that can slice rows of the longest length, with the layers computed again."""
    fewest = DEVICES * LENGTHS[-1] // TOKENS  # devices that share a row
    return [
        Choice(
            within=DEVICES,
            tensor=tensor,
            context=context,
            attention=attention,
            microbatches=TOKENS // LENGTHS[-1] // (DEVICES // tensor // context),
            saved=0.0,
        )
        for tensor, context in itertools.product(DEGREES[:4], DEGREES)
        for attention in ("ring", "gather")
        if fewest <= tensor * context <= DEVICES
    ]


# For shorter rows alone, with the longest that each is tried for.
SHORT = {
    Choice(within=64, microbatches=4): LENGTHS[0],
    Choice(within=64, context=4, attention="heads", microbatches=2): LENGTHS[1],
    Choice(within=64, context=8, attention="heads", microbatches=2): LENGTHS[2],
    Choice(within=64, tensor=2, context=4, attention="heads", microbatches=2): LENGTHS[2],
}


def mean_seconds(steps: Steps, moves: Moves, choices: Mapping[int, Choice]) -> tuple[float, float]:
    """Return the mean seconds of a step over the distribution, and of the moves before it.

    choices: for each length. The length of a step does not depend on that of the step before.
    """
    share = shares(tuple(choices))
    step = sum(share[length] * steps[choice, length].seconds for length, choice in choices.items())
    pairs = itertools.product(choices, repeat=2)
    moved = sum(share[a] * share[b] * moves[choices[a].layout, choices[b].layout] for a, b in pairs)
    return step, moved


def best_by_length(
    steps: Steps, moves: Moves, lengths: Sequence[int], *, alike: bool = False
) -> dict[int, Choice]:
    """Return the choices with the shortest mean step, moves included. alike: none may move."""
    fitting = {n: [c for c, length in steps if length == n and steps[c, n].fits] for n in lengths}
    layouts = dict.fromkeys(choice.layout for choice, _ in steps)
    mixes: list[dict[int, Choice]] = []
    for chosen in itertools.product(layouts, repeat=len(lengths)):
        by_length = dict(zip(lengths, chosen, strict=True))
        options = {n: [c for c in fitting[n] if c.layout == layout] for n, layout in by_length.items()}
        if all(options.values()) and (not alike or len(set(chosen)) == 1):
            mixes.append({n: min(cs, key=lambda c: steps[c, n].seconds) for n, cs in options.items()})
    return min(mixes, key=lambda mix: sum(mean_seconds(steps, moves, mix)))


def moves_of(steps: Steps) -> dict[tuple[tuple[int, int], tuple[int, int]], float]:
    """Return the simulated seconds of the move between any two layouts, proven."""
    buckets = {choice.layout: step.buckets for (choice, _), step in steps.items()}
    costs = Roofline(load_cluster(CLUSTER))
    seconds = {(layout, layout): 0.0 for layout in buckets}
    for before, after in itertools.permutations(buckets, 2):
        plans = moving_plans(buckets[before], buckets[after], tuple(range(DEVICES)), STATE_BYTES)
        seconds[before, after] = simulate(plans, None, costs).step
        nbytes = sum(ins.nbytes for ins in plans.plans[0].instrs)
        name = f"ZeRO-3 in {before[0]}, TP{before[1]} to ZeRO-3 in {after[0]}, TP{after[1]}"
        print(
            f"move  {name:64} {seconds[before, after]:6.3f} s, {nbytes / 2**30:4.2f} GiB a device", flush=True
        )
    return seconds


def show(steps: Steps, moves: Moves, lengths: Sequence[int]) -> None:
    """Print the best strategies by length beside the single ones that serve all lengths."""
    mix = best_by_length(steps, moves, lengths)
    print(f"\nDocuments of at most {lengths[-1]:,} tokens: the best strategy of each length")
    for length, share in shares(lengths).items():
        print(f"{length:8} {share:6.1%} of tokens  {mix[length].name}")
    step, moved = mean_seconds(steps, moves, mix)
    mixed = step + moved
    print(
        f"Mean seconds of a step:\n  {mixed:6.2f}         a strategy for each length, {moved:.3f} of it moves"
    )
    alike = sum(mean_seconds(steps, moves, best_by_length(steps, moves, lengths, alike=True)))
    print(f"  {alike:6.2f}  {alike / mixed:4.2f}x  a strategy for each length, none of which moves the state")
    single = [
        c
        for c in dict.fromkeys(c for c, _ in steps)
        if all((c, n) in steps and steps[c, n].fits for n in lengths)
    ]
    means = {choice: mean_seconds(steps, moves, dict.fromkeys(lengths, choice))[0] for choice in single}
    for choice, alone in sorted(means.items(), key=lambda entry: entry[1])[:SHOWN]:
        print(f"  {alone:6.2f}  {alone / mixed:4.2f}x  {choice.name}, for all lengths")


def simulated(
    pairs: Sequence[tuple[Choice, int]], pool: ProcessPoolExecutor
) -> dict[tuple[Choice, int], Step]:
    """Simulate steps, and print each."""
    steps: dict[tuple[Choice, int], Step] = {}
    choices, lengths = [choice for choice, _ in pairs], [length for _, length in pairs]
    for pair, step in zip(pairs, pool.map(planned, choices, lengths), strict=True):
        steps[pair] = step
        fits = "" if step.fits else ", does not fit"
        numbers = f"{step.seconds:6.2f} s, {step.exposed:4.0%} exposed, {step.peak:5.1f} GiB{fits}"
        print(f"{pair[1]:8}  {pair[0].name:66} {numbers}", flush=True)
    return steps


def main() -> None:
    with ProcessPoolExecutor(max_workers=2) as pool:
        steps = simulated([(choice, LENGTHS[-1]) for choice in for_longest()], pool)
        fitting = [choice for (choice, _), step in steps.items() if step.fits]
        more = [(replace(choice, saved=saved), LENGTHS[-1]) for choice in fitting for saved in (0.5, 1.0)]
        steps |= simulated(more, pool)
        single = [choice for (choice, _), step in steps.items() if step.fits]
        pairs = [(choice, length) for choice in single for length in LENGTHS[:-1]]
        pairs += [(choice, n) for choice, last in SHORT.items() for n in LENGTHS if n <= last]
        steps |= simulated(pairs, pool)
    moves = moves_of(steps)
    for longest in (3, 4):
        show(steps, moves, LENGTHS[:longest])


if __name__ == "__main__":
    main()
