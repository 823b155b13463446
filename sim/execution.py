"""Runs a network on a machine: predicts it, computes its values, runs it on the RTL if asked, and compares.

An ONNX model's other nodes run on the host; any other network runs level after level. What is independent of each other
runs together, as many streams as the machine has: elements of a batch and both directions of a level. Levels of one layer
run together too where that takes fewer cycles, each a step or two behind the one before. Every such group is one program
and, on the RTL, one run; cycles and events add up over the runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import onnxruntime

from sharp.model import numerics
from sharp.model.compiler import Recurrence
from sharp.model.errors import NetworkError
from sharp.model.images import quantise
from sharp.model.layer import Layer, require_values
from sharp.model.machine import Machine
from sharp.model.network import Network
from sharp.model.numerics import Values
from sharp.model.planner import Plan, plan_streams
from sharp.model.program import Tiling
from sharp.model.sequence import Result, Task
from sharp.model.timing import IDLE_REASONS

from . import bench
from .bench_driver import Trace
from .host import HostGraph
from .packaged import TASKS, Score
from .sound import silero_chunks, speech_and_noise

Progress = Callable[[str], None]
INPUT_SEED = 1
DEFAULT_STEPS = 50  # of seeded inputs for a network whose length comes with its inputs


@dataclass(frozen=True)
class MachineRun:
    """A run of the machine: its plan, what the model computes and, from the RTL, a trace."""

    name: str
    plan: Plan
    values: Values
    trace: Trace | None = None

    @cached_property
    def counts(self) -> dict[str, int]:
        """Predicted counters, saturations included."""
        return self.plan.timing.counts | {"saturations": self.values.saturations}

    @property
    def values_match(self) -> bool:
        pairs = zip(self.trace.outputs + self.trace.states, self.values.outputs + self.values.states, strict=True)
        return all(_same_bits(*pair) for pair in pairs)

    @property
    def cycles_match(self) -> bool:
        """Every output beat, and so every step, passed in the predicted cycle, and the run took the predicted cycles."""
        beats_match = np.array_equal(self.trace.output_cycles, self.plan.timing.output_cycles)
        return beats_match and self.trace.counts["cycles"] == self.counts["cycles"]

    @property
    def events_match(self) -> bool:
        return self.trace.counts == self.counts


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@dataclass(frozen=True)
class Execution:
    """A network on a machine: the machine's runs, its outputs by name, and the reference's outputs, if there is one.

    score : how well a real task is done, for a network that comes with one and is run without inputs
    """

    network: Network
    machine: Machine
    schedule: str
    runs: tuple[MachineRun, ...]
    outputs: Mapping[str, np.ndarray]
    reference: Mapping[str, np.ndarray] | None = None
    simulated: bool = False
    score: Score | None = None

    @cached_property
    def counts(self) -> dict[str, int]:
        return {name: sum(run.counts[name] for run in self.runs) for name in self.runs[0].counts}

    @property
    def cycles(self) -> int:
        return self.counts["cycles"]

    @property
    def steps(self) -> int:
        """Steps of the longest run: elements of a batch may be shorter."""
        return max(run.plan.steps for run in self.runs)

    @property
    def bound_cycles(self) -> int:
        return sum(run.plan.bound_cycles for run in self.runs)

    @property
    def utilisation(self) -> float:
        """Multiplications of matrix entries over all that the multipliers could have done."""
        return self.counts["active_macs"] / (self.machine.macs * self.cycles)

    @property
    def events(self) -> dict[str, int]:
        """Event counts: the counters, and what follows from them by the machine's size."""
        macs = self.machine.macs
        counts = {name: count for name, count in self.counts.items() if not name.startswith("idle_") and name != "cycles"}
        multiplications = counts["tiles"] * macs
        return counts | {
            "weight_word_reads": counts["tiles"],
            "multiplications": multiplications,
            "padded_macs": multiplications - counts["active_macs"],
            "tree_additions": multiplications - counts["tile_rows"],
            "accumulations": counts["tile_rows"],
        }

    @property
    def matches(self) -> bool:
        return all(run.values_match and run.cycles_match and run.events_match for run in self.runs)

    def result(self) -> dict:
        """Return what `result.json` holds."""
        rtl = reference = None
        if self.simulated:
            cycles = sum(run.trace.counts["cycles"] for run in self.runs)
            rtl = {
                "cycles": cycles,
                "values_match": all(run.values_match for run in self.runs),
                "cycles_match": all(run.cycles_match for run in self.runs),
                "events_match": all(run.events_match for run in self.runs),
                "cycles_per_second": cycles / sum(run.trace.seconds for run in self.runs),
            }
        if self.reference is not None:
            reference = {
                "engine": f"onnxruntime {onnxruntime.__version__}",
                "max_abs_error": {name: _max_abs_error(self.outputs[name], expected) for name, expected in self.reference.items()},
            }
        return {
            "network": self.network.name,
            "machine": {"name": self.machine.name, "hash": self.machine.hash},
            "schedule": self.schedule,
            "runs": [
                {
                    "name": run.name,
                    "streams": [
                        {
                            "cell": run.plan.shapes[each.layer].cell,
                            "inputs": run.plan.shapes[each.layer].inputs,
                            "hidden": run.plan.shapes[each.layer].hidden,
                            "steps": each.steps,
                            "follows": each.source,
                        }
                        for each in run.plan.recurrences
                    ],
                    "tile_rows": run.plan.program.tile,
                    "steps": run.plan.steps,
                    "cycles": run.counts["cycles"],
                    "bound_cycles": run.plan.bound_cycles,
                    "idle": run.plan.timing.idle,
                }
                for run in self.runs
            ],
            "cycles": self.cycles,
            "steps": self.steps,
            "cycles_per_step": self.cycles / self.steps,
            "bound_cycles": self.bound_cycles,
            "bound_ratio": self.bound_cycles / self.cycles,
            "utilisation": self.utilisation,
            "seconds": self.cycles / self.machine.clock_hz,
            "events": self.events,
            "idle": {reason: self.counts[f"idle_{reason}"] for reason in IDLE_REASONS},
            "rtl": rtl,
            "reference": reference,
            "score": None if self.score is None else asdict(self.score),
        }


def _max_abs_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)), initial=0.0))


@dataclass
class MachineRecurrent:
    """Runs tasks on the model of a machine and, asked to, on its RTL; what it has done stands in `runs`.

    streams : most that run together, at most as many as the machine has
    """

    machine: Machine
    schedule: str
    tile: int | None
    rtl: bool
    streams: int
    progress: Progress = lambda phase: None
    runs: list[MachineRun] = field(default_factory=list)

    def __call__(self, tasks: Sequence[Task]) -> list[Result]:
        """Run independent tasks, those of like length together; results are in the tasks' order."""
        order = sorted(range(len(tasks)), key=lambda index: -len(tasks[index].x))
        results: dict[int, Result] = {}
        for first in range(0, len(order), self.streams):
            group = order[first : first + self.streams]
            results.update(zip(group, self._together([tasks[index] for index in group]), strict=True))
        return [results[index] for index in range(len(tasks))]

    def _together(self, tasks: Sequence[Task]) -> list[Result]:
        """Run tasks as streams of one run or, where they do not fit the machine so, one by one."""
        layers = list({id(task.layer): task.layer for task in tasks}.values())
        places = {id(layer): index for index, layer in enumerate(layers)}
        recurrences = [Recurrence(places[id(task.layer)], len(task.x)) for task in tasks]
        try:
            planned = self._plan(layers, recurrences)
        except NetworkError:
            if len(tasks) == 1:
                raise
            return [result for task in tasks for result in self._together([task])]
        return self._run(layers, tasks, planned)

    def chain(self, tasks: Sequence[Task]) -> list[Result] | None:
        """Run tasks of which each takes the outputs of the one before, if that takes fewer cycles together than one by one.

        The x of all but the first is None. Returns None where one by one is better or the machine cannot hold them together.
        """
        layers, steps = [task.layer for task in tasks], len(tasks[0].x)
        recurrences = [Recurrence(index, steps, index - 1 if index else None) for index in range(len(tasks))]
        try:
            together = self._plan(layers, recurrences)
        except NetworkError:
            return None
        alone = sum(self._plan([layer], [Recurrence(0, steps)]).timing.cycles for layer in layers)
        if together.timing.cycles >= alone:
            return None
        return self._run(layers, tasks, together)

    def _plan(self, layers: Sequence[Layer], recurrences: Sequence[Recurrence]) -> Plan:
        self.progress(f"predicting {_names(layers)}")
        tilings = None if self.tile is None else [Tiling(self.tile, self.tile)] * len(layers)
        return plan_streams(self.machine, [layer.shape for layer in layers], recurrences, schedule=self.schedule, tilings=tilings)

    def _run(self, layers: Sequence[Layer], tasks: Sequence[Task], planned: Plan) -> list[Result]:
        program = planned.loaded(layers, [(task.hidden, task.cell) for task in tasks])
        inputs = program.input_stream([None if task.x is None else quantise(task.x) for task in tasks])
        name = _names(tasks)
        self.progress(f"computing {name}")
        values = numerics.execute(program, inputs)
        trace = None
        if self.rtl:
            run = bench.Run(program, inputs, planned.timing)
            (trace,) = bench.simulate(self.machine, [run], lambda phase: self.progress(f"RTL of {name}: {phase}"))
        self.runs.append(MachineRun(name, planned, values, trace))
        return [
            Result(y.astype(np.float32), y[-1].astype(np.float32), state if len(state) else None)
            for y, state in zip(values.outputs, values.states, strict=True)
        ]


def _names(named: Sequence[Layer] | Sequence[Task]) -> str:
    return " + ".join(dict.fromkeys(each.name for each in named))


def machine_recurrent(machine: Machine) -> MachineRecurrent:
    """Return what computes tasks with the numerics of `machine`, all its streams and its best schedule and tiles."""
    return MachineRecurrent(machine, "unfolded", None, False, machine.streams)


def execute(
    network: Network,
    machine: Machine,
    *,
    schedule: str,
    tile: int | None,
    inputs: Mapping[str, np.ndarray] | None = None,
    streams: int | None = None,
    rtl: bool = False,
    progress: Progress = lambda phase: None,
) -> Execution:
    """Run `network` on `machine`.

    inputs : arrays by input name; None takes the network's own (a task, a sound, or seeded random vectors)
    tile : rows of a tile, None for the best
    streams : most recurrences that run together, None for as many as the machine has

    Raises ConfigError and NetworkError for what the user can set right, SimulationError when the RTL's bench fails.
    """
    streams = machine.streams if streams is None else streams
    machine.require_streams(streams)
    runner = MachineRecurrent(machine, schedule, tile, rtl, streams, progress)
    reference = None
    if network.model_file is not None:
        graph = HostGraph.load(network.model_file)
        given = default_inputs(network, graph) if inputs is None else dict(inputs)
        outputs = graph.run(given, runner)
        progress("running the reference")
        reference = graph.reference(given)
    elif inputs is None and network.name in TASKS:
        progress(f"running the task of {network.name}")
        score = TASKS[network.name](runner)
        return Execution(network, machine, schedule, tuple(runner.runs), {}, None, rtl, score)
    else:
        outputs = _run_levels(network, _level_input(network, inputs), runner)
    return Execution(network, machine, schedule, tuple(runner.runs), outputs, reference, rtl)


def default_inputs(network: Network, graph: HostGraph) -> dict[str, np.ndarray]:
    """Return the inputs that a ready-made network runs on by default; NetworkError for any other model."""
    if network.name != "silero-vad":
        needed = ", ".join(f"{port.name} {port}" for port in graph.inputs)
        raise NetworkError(f"network {network.name} needs inputs (--inputs FILE.npz) with {needed}")
    chunks = silero_chunks(speech_and_noise())
    state = np.zeros((1, 1, 128), np.float32)
    return {"input": chunks, "h": state, "c": state}


def _level_input(network: Network, inputs: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return float32[steps, D], the first level's input: `x` of the given inputs, or seeded random values in +-1."""
    elements = network.levels[0][0].inputs
    if not network.chained:
        raise NetworkError(f"network {network.name}: its layers do not follow each other; run it without inputs, as the task it is for")
    for before, level in pairwise(network.levels):
        outputs = sum(shape.outputs for shape in before)
        if level[0].inputs != outputs:
            raise NetworkError(
                f"network {network.name}: layer {level[0].name} must take the {outputs} outputs of the layers before, "
                f"not {level[0].inputs} values: what lies between them is not run"
            )
    if inputs is None:
        generator = np.random.Generator(np.random.PCG64(INPUT_SEED))
        return 2 * generator.random((network.steps or DEFAULT_STEPS, elements), dtype=np.float32) - 1
    if set(inputs) != {"x"}:
        raise NetworkError(f"inputs of network {network.name} must be x float32 (steps, {elements}), not {', '.join(inputs) or 'nothing'}")
    x = inputs["x"]
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != elements or len(x) == 0:
        raise NetworkError(f"input 'x' must be float32 (steps, {elements}), not {x.dtype} {x.shape}")
    require_values("input 'x'", x, float16=True)
    return x


def _run_levels(network: Network, x: np.ndarray, runner: MachineRecurrent) -> dict[str, np.ndarray]:
    """Run the levels one after another; return the last level's outputs `y`, and `h` and `c` of all layers in order.

    `c` holds the LSTMs' cell states alone. Where layers differ in size, the shorter states end in zeros.
    """
    layers = iter(network.layers)
    # The x of a later level takes its place when it is there.
    levels = [[Task.of(next(layers), x) for _ in level] for level in network.levels]
    results: list[Result] = []
    position = 0
    while position < len(levels):
        count = 1
        while position + count < len(levels) and count < runner.streams and _can_follow(levels[position : position + count + 1]):
            count += 1
        chained = [level[0] for level in levels[position : position + count]]
        done = runner.chain([replace(task, x=None if index else x) for index, task in enumerate(chained)]) if count > 1 else None
        if done is None:
            level, count = levels[position], 1
            done = runner([replace(task, x=x[::-1] if task.layer.reverse else x) for task in level])
            x = np.concatenate([each.y[::-1] if task.layer.reverse else each.y for task, each in zip(level, done, strict=True)], axis=1)
        else:
            x = done[-1].y
        results += done
        position += count
    cells = [each.cell for each in results if each.cell is not None]
    return {"y": x, "h": _stacked([each.hidden for each in results])} | ({"c": _stacked(cells)} if cells else {})


def _can_follow(levels: Sequence[Sequence[Task]]) -> bool:
    """Return whether each level is one layer that reads time forwards."""
    return all(len(level) == 1 and not level[0].layer.reverse for level in levels)


def _stacked(vectors: Sequence[np.ndarray]) -> np.ndarray:
    length = max(map(len, vectors))
    return np.stack([np.pad(vector, (0, length - len(vector))) for vector in vectors])
