"""Draws a predicted run as a timeline: Chrome trace events for Perfetto, and a figure of its steady state.

Three rules. A span covers the cycles `first` to `last`, both included; in time it lasts one cycle more than their
difference. Spans of one track do not overlap, but for the updates of a cell that takes several. A stall is named by what
the tile that comes after it waited for; how many cycles were idle for which reason is what the counters say, and they stand
in the metadata.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from sharp.model.machine import CURSORS_PER_STREAM, Machine
from sharp.model.planner import Plan
from sharp.model.program import WORK, Instruction, Operand, Post, Source, Tile, Update
from sharp.model.timing import Contract

EVENT_LIMIT = 80_000  # of a trace file, about 16 MB
FIGURE_STEPS = 3
LETTER_SHARE = 0.009  # of a picture's width; a label that does not fit its span is left out
GATE_NAMES = {"lstm": "ifgo", "gru": ("U h", "z", "r", "n"), "rnn": ("h",) * 4}


class Track(Enum):
    """A unit of the machine, in the order of the data's way through it."""

    INPUT = "input stream"
    TILES = "tiles"
    STALLS = "tile stalls"
    ACTIVATION = "activation"
    UPDATE = "cell update"
    MEMORY = "weight stream"
    OUTPUT = "output stream"


@dataclass(frozen=True)
class Kind:
    """How a kind of span is drawn: its colour, what the legend says of it, and the label of one step's span."""

    colour: str
    meaning: str
    label: str
    ink: str = "black"
    hatch: str | None = None


# Colours that stay apart for the colour-blind (Okabe and Ito, 2008).
KINDS = {
    "x": Kind("#999999", r"$x_t$ arrives", "$x_{{{step}}}$"),
    "input part": Kind("#E69F00", r"input part $W x_t$", "$W x_{{{step}}}$"),
    "hidden part": Kind("#0072B2", r"hidden part $U h_{t-1}$", "$U h_{{{before}}}$", ink="white"),
    "projection": Kind("#009E73", "projection or candidate, whose vector is made in the step", "$V m_{{{step}}}$"),
    "weights": Kind("#666666", "weights come from memory", "weights {step}", ink="white"),
    "wait for weights": Kind("#666666", "tiles wait for weights", "waits for weights", ink="white", hatch="///"),
    "wait for x": Kind("#F0E442", "tiles wait for x", "waits for $x_{{{step}}}$", hatch="///"),
    "wait for h": Kind("#D55E00", "tiles wait for h", "waits for $h_{{{before}}}$", hatch="///"),
    "gates": Kind("#009E73", "sums go to the activation lanes", "gates {step}"),
    "update": Kind("#CC79A7", "cells are updated", "$c_{{{step}}}$, $h_{{{step}}}$"),
    "h": Kind("#56B4E9", r"$h_t$ is written and leaves", "$h_{{{step}}}$"),
    "c": Kind("#000000", "last cell states leave", "$c$", ink="white"),
}


@dataclass(frozen=True)
class Span:
    """Something that a unit does in the cycles `first` to `last` for step `step` of a stream; `kind` is a key of KINDS."""

    track: Track
    kind: str
    stream: int
    step: int
    first: int
    last: int
    args: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.step}" + (f" of stream {self.stream}" if self.stream else "")

    @property
    def cycles(self) -> int:
        return self.last - self.first + 1


def spans(plan: Plan) -> list[Span]:
    """Return what each unit of the machine does when, in the order of the program."""
    machine, timing, program = plan.machine, plan.timing, plan.program
    executed = list(program.executed())
    found = [
        Span(Track.INPUT, "x", stream, step, first, last)
        for (stream, step), (first, last) in zip(program.input_order.tolist(), timing.input_spans.tolist(), strict=True)
    ]
    issued = sorted([*timing.tile_spans.tolist(), *timing.post_spans.tolist()], key=lambda row: row[3])
    owners = _owners(plan, executed)
    beat, free, words = 0, 0, 0
    for first, last, issues, index in issued:
        instruction = executed[index]
        kind, stream, step = owners[index]
        if isinstance(instruction, Tile):
            if first > free:
                waits = "wait for weights" if instruction.streamed else "wait for x" if kind == "input part" else "wait for h"
                found.append(Span(Track.STALLS, waits, stream, step, free, first - 1))
            free = last + 1
            height = instruction.height(machine)
            args = {
                "tiles": issues,
                "stalled cycles": last - first + 1 - issues,
                "tile": f"{height} x {machine.columns(height)}",
                "region": f"{instruction.rows} x {instruction.columns}",
            }
            found.append(Span(Track.TILES, kind, stream, step, first, last, args))
            if instruction.streamed:
                ready = timing.word_cycles[words : words + issues]
                words += issues
                found.append(Span(Track.MEMORY, "weights", stream, step, int(ready[0]) - machine.memory_beats, int(ready[-1]) - 1))
        else:
            cell = plan.shapes[program.streams[stream].layer].cell
            found += _post_spans(instruction, cell, step, first, last, issues, Contract(machine))
            if instruction.emit:
                beats = timing.output_cycles[beat : beat + issues]
                beat += issues
                kind = "c" if instruction.update is Update.STATE else "h"
                found.append(Span(Track.OUTPUT, kind, stream, step, int(beats[0]), int(beats[-1]), {"beats": issues}))
    return found


def _owners(plan: Plan, executed: Sequence[Instruction]) -> dict[int, tuple[str, int, int]]:
    """Return kind, stream and step of each tile and post instruction, by its index.

    A vector x is done with where its cursor moves; a step ends with the last group that sends its h out.
    """
    streams = plan.program.streams
    vectors = iter(plan.program.input_order.tolist())
    owner, reading = next(vectors, (0, 0)), [0] * len(streams)
    steps = [0] * len(streams)
    owners: dict[int, tuple[str, int, int]] = {}
    for index, instruction in enumerate(executed):
        match instruction:
            case Tile(operand=Operand.INPUT):
                owners[index] = ("input part", *owner)
                if instruction.advance:
                    owner = next(vectors, owner)
            case Tile() if instruction.cursor % CURSORS_PER_STREAM == 0:
                stream = instruction.cursor // CURSORS_PER_STREAM - 1
                owners[index] = ("input part", stream, reading[stream])
                reading[stream] += instruction.advance > 0
            case Tile():
                stream, which = divmod(instruction.cursor - 1, CURSORS_PER_STREAM)
                owners[index] = ("projection" if which else "hidden part", stream, steps[stream])
            case Post():
                stream = instruction.stream
                owners[index] = ("update", stream, min(steps[stream], streams[stream].steps - 1))
                last = instruction.neuron + instruction.neurons == streams[stream].outputs
                steps[stream] += instruction.emit and last and instruction.update is not Update.STATE
    return owners


def _post_spans(post: Post, cell: str, step: int, first: int, last: int, groups: int, contract: Contract) -> Iterable[Span]:
    args = {"groups": groups, "neurons": post.neurons}
    if post.update is not Update.STATE and post.source is not Source.BUFFER:
        names = GATE_NAMES[cell]
        gates = ", ".join(names) if post.source is Source.INTERLEAVED else names[post.slot]
        yield Span(Track.ACTIVATION, "gates", post.stream, step, first, last, {"gates": gates, **args})
    if WORK[post.update].multiplications:
        first, last = first + contract.gate_cycles, last + contract.gate_cycles
        yield Span(Track.UPDATE, "update", post.stream, step, first, last, {"update": post.update.name, **args})


def trace_events(plans: Sequence[tuple[str, Plan]], *, event_limit: int = EVENT_LIMIT) -> bytes:
    """Return a run of layers, one after another, as a Chrome trace file: a process per layer, a thread per unit.

    plans : (layer name, plan) in the order of the run

    Times are those of the machine's clock, in microseconds as the format asks; `args` carry cycles, counted from the start
    of the layer. A run of more events than the limit is cut after as many first steps of each layer as fit.
    """
    machine = plans[0][1].machine
    events, layers, start = [], [], 0
    for process, (name, plan) in enumerate(plans, 1):
        found = spans(plan)
        shown = _steps_within(found, event_limit // len(plans))
        layers_named = " + ".join(f"{shape.cell.upper()} {shape.inputs} -> {shape.hidden}" for shape in plan.shapes)
        title = f"{name}: {layers_named}, tile K = {plan.program.tile}"
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}})
        for thread, track in enumerate(Track, 1):
            events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": track.value}})
            events.append({"name": "thread_sort_index", "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": thread}})
        threads = {track: thread for thread, track in enumerate(Track, 1)}
        events += [_event(span, process, threads[span.track], start, machine) for span in found if span.step < shown]
        steps = "all" if shown >= plan.steps else f"the first {shown}"
        cycles = plan.timing.cycles
        layers.append(
            {"name": name, "steps": plan.steps, "steps_shown": steps, "first_cycle": start, "cycles": cycles, "idle": plan.timing.idle}
        )
        start += cycles
    about = {
        "machine": f"{machine.name} {machine.hash}",
        "clock_hz": machine.clock_hz,
        "cycles": start,
        "layers": layers,
        "stalls": "named by the operand of the next tile; `idle` of a layer holds the counted cycles by reason",
    }
    # A step's spans are known before those of the next; viewers want them by time.
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}, separators=(",", ":")).encode()


def _steps_within(found: Sequence[Span], limit: int) -> int:
    """Return how many first steps have `limit` spans or fewer, at least one."""
    counts = Counter(span.step for span in found)
    total = 0
    for step in sorted(counts):
        total += counts[step]
        if total > limit:
            return max(1, step)
    return max(counts) + 1


def _event(span: Span, process: int, thread: int, start: int, machine: Machine) -> dict:
    def microseconds(cycles: int) -> float:
        return round(cycles / machine.clock_hz * 1e6, 6)

    return {
        "name": span.name,
        "cat": span.track.value,
        "ph": "X",
        "ts": microseconds(start + span.first),
        "dur": microseconds(span.cycles),
        "pid": process,
        "tid": thread,
        "args": {"first cycle": span.first, "last cycle": span.last, **span.args},
    }


def figure(plan: Plan, title: str) -> bytes:
    """Draw some steps in the middle of a run, and beneath them the moment between two steps; return a PNG.

    The lower picture is the recurrence: from the last tile of a step, L cycles go by until a tile can read all of its h;
    what fills them is the next step's input part, or a stall.
    """
    # Imported here: it takes longer than predicting most networks.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = _joined(spans(plan))
    last_of = {span.step: span.last for span in found if span.track is Track.TILES and span.stream == 0}
    shown = min(FIGURE_STEPS, plan.steps)
    step = (plan.steps - shown) // 2
    start = last_of[step - 1] + 1 if step else 0
    end = last_of[step + shown - 1] + 1 if step + shown < plan.steps else plan.timing.cycles
    recurrence, turn = Contract(plan.machine).recurrence_cycles(plan.shape), last_of[step]

    picture = Figure(figsize=(11, 6.4), layout="constrained")
    picture.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    rows = len(_tracks(found))
    upper, lower = picture.subplots(2, 1, height_ratios=(rows, rows + 1))
    drawn = _draw(upper, found, start, end, plan.machine)
    steps = f"steps {step} to {step + shown - 1}" if shown > 1 else f"step {step}"
    streams = f" of {len(plan.recurrences)} streams" if len(plan.recurrences) > 1 else ""
    bound = plan.bound_cycles / plan.steps
    per_step = f"{plan.timing.cycles / plan.steps:,.1f} cycles a step{streams} over the whole run, bound {bound:,.1f}"
    upper.set_title(f"{steps} of {plan.steps:,}: {per_step}", loc="left", fontsize=10)
    drawn |= _draw(lower, found, turn - recurrence, turn + 2 * recurrence, plan.machine)
    least = f"L = {recurrence} cycles at least from its last tile to a tile that reads all of its h"
    lower.set_title(f"step {step} ends: {least}", loc="left", fontsize=10)
    lower.axvspan(turn, turn + recurrence, color="0.93", zorder=0)
    arrow = {"arrowstyle": "<|-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
    lower.annotate("", (turn + recurrence, -1), (turn, -1), arrowprops=arrow)
    lower.text(turn + recurrence / 2, -0.95, f"L = {recurrence}", ha="center", va="bottom", fontsize=9)
    lower.set_ylim(bottom=-1.4)
    kinds = [KINDS[kind] for kind in KINDS if kind in drawn]
    patches = [Patch(facecolor=kind.colour, hatch=kind.hatch, edgecolor="white", label=kind.meaning) for kind in kinds]
    picture.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    content = io.BytesIO()
    # The version of the library would be the one thing in the file that the run does not decide.
    picture.savefig(content, format="png", dpi=160, metadata={"Software": None})
    return content.getvalue()


def _joined(found: Iterable[Span]) -> list[Span]:
    """Join spans of the same kind and step that follow each other without a gap."""
    joined: list[Span] = []
    newest: dict[Track, int] = {}
    for span in found:
        index = newest.get(span.track)
        before = joined[index] if index is not None else None
        follows = before is not None and before.last + 1 == span.first
        if follows and (before.kind, before.stream, before.step) == (span.kind, span.stream, span.step):
            joined[index] = replace(before, last=span.last)
        else:
            newest[span.track] = len(joined)
            joined.append(span)
    return joined


def _tracks(found: Iterable[Span]) -> list[Track]:
    """Return the tracks to draw, the lowest first: all but the weight stream where no weights come from memory."""
    streams = any(span.track is Track.MEMORY for span in found)
    return [track for track in reversed(Track) if streams or track is not Track.MEMORY]


def _draw(axes, found: Sequence[Span], start: int, end: int, machine: Machine) -> set[str]:
    """Draw the spans that lie in the cycles from `start` up to `end`, a track below the other; return their kinds."""
    drawn, tracks = set(), _tracks(found)
    for span in found:
        left, right = max(span.first, start), min(span.last + 1, end)
        if left >= right:
            continue
        drawn.add(span.kind)
        kind, y = KINDS[span.kind], tracks.index(span.track)
        axes.barh(y, right - left, left=left, height=0.7, color=kind.colour, hatch=kind.hatch, edgecolor="white", linewidth=0.6)
        text = kind.label.format(step=span.step, before=span.step - 1 if span.step else "initial")
        if right - left > LETTER_SHARE * len(re.sub(r"[${}_]", "", text)) * (end - start):
            back = {"facecolor": kind.colour, "edgecolor": "none", "pad": 1} if kind.hatch else None
            axes.text((left + right) / 2, y, text, ha="center", va="center", fontsize=9, color=kind.ink, bbox=back)
    axes.set_xlim(start, end)
    axes.set_ylim(-0.6, len(tracks) - 0.4)
    axes.set_yticks(range(len(tracks)), [track.value for track in tracks])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"cycle (1 cycle = {1e9 / machine.clock_hz:.4g} ns)", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return drawn
