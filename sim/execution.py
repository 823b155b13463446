"""Runs a network on a machine: predicts it, computes its values, runs it on the RTL if asked, and compares.

An ONNX model's other nodes run on the host; a network known by its shapes runs level after level. Every recurrent layer
is one program and, on the RTL, one run; so is each direction of an ONNX node and each element of its batch. Cycles and
events add up over the runs, which are the layers below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnxruntime

from sharp.model import numerics
from sharp.model.errors import NetworkError
from sharp.model.machine import Machine
from sharp.model.network import LstmLayer, Network, require_values
from sharp.model.numerics import Values
from sharp.model.planner import Plan, plan
from sharp.model.program import Program
from sharp.model.timing import IDLE_REASONS

from . import bench
from .bench_driver import Trace
from .host import HostGraph
from .sound import silero_chunks, speech_and_noise

Progress = Callable[[str], None]
INPUT_SEED = 1


@dataclass(frozen=True)
class LayerRun:
    """One recurrent layer's run: plan, program with its images, float16 inputs, model values and, from the RTL, a trace."""

    name: str
    plan: Plan
    program: Program
    inputs: np.ndarray
    values: Values
    trace: Trace | None = None

    @cached_property
    def counts(self) -> dict[str, int]:
        """Predicted counters, saturations included."""
        return self.plan.timing.counts | {"saturations": self.values.saturations}

    @property
    def values_match(self) -> bool:
        return _same_bits(self.trace.outputs, self.values.outputs) and _same_bits(self.trace.cell, self.values.cell)

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
    """A network's run on a machine: its layers' runs, its outputs by name, and the reference's outputs, if there is one."""

    network: Network
    machine: Machine
    schedule: str
    layers: tuple[LayerRun, ...]
    outputs: Mapping[str, np.ndarray]
    reference: Mapping[str, np.ndarray] | None = None
    simulated: bool = False

    @cached_property
    def counts(self) -> dict[str, int]:
        return {name: sum(layer.counts[name] for layer in self.layers) for name in self.layers[0].counts}

    @property
    def cycles(self) -> int:
        return self.counts["cycles"]

    @property
    def steps(self) -> int:
        """Steps of the longest run: elements of a batch may be shorter."""
        return max(layer.plan.steps for layer in self.layers)

    @property
    def bound_cycles(self) -> int:
        return sum(layer.plan.bound_cycles for layer in self.layers)

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
        return all(layer.values_match and layer.cycles_match and layer.events_match for layer in self.layers)

    def result(self) -> dict:
        """Return what `result.json` holds."""
        rtl = reference = None
        if self.simulated:
            cycles = sum(layer.trace.counts["cycles"] for layer in self.layers)
            rtl = {
                "cycles": cycles,
                "values_match": all(layer.values_match for layer in self.layers),
                "cycles_match": all(layer.cycles_match for layer in self.layers),
                "events_match": all(layer.events_match for layer in self.layers),
                "cycles_per_second": cycles / sum(layer.trace.seconds for layer in self.layers),
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
            "layers": [
                {
                    "name": layer.name,
                    "inputs": layer.plan.shape.inputs,
                    "hidden": layer.plan.shape.hidden,
                    "tile_rows": layer.program.tile,
                    "steps": layer.plan.steps,
                    "cycles": layer.counts["cycles"],
                    "bound_cycles": layer.plan.bound_cycles,
                    "idle": layer.plan.timing.idle,
                }
                for layer in self.layers
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
        }


def _max_abs_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)), initial=0.0))


@dataclass
class _Runner:
    """Runs layers one by one on the model and, asked to, on the RTL."""

    machine: Machine
    schedule: str
    tile: int | None
    rtl: bool
    progress: Progress
    runs: list[LayerRun] = field(default_factory=list)

    def __call__(self, layer: LstmLayer, x: np.ndarray, hidden: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, ...]:
        self.progress(f"predicting {layer.name}")
        planned = plan(self.machine, layer.shape, steps=len(x), schedule=self.schedule, tile=self.tile)
        program = planned.loaded(layer, hidden, cell)
        inputs = np.asarray(x, np.float32).astype(np.float16)
        if layer.reverse:
            inputs = inputs[::-1]
        self.progress(f"computing {layer.name}")
        values = numerics.execute(program, inputs)
        trace = None
        if self.rtl:
            run = bench.Run(program, inputs, planned.timing)
            (trace,) = bench.simulate(self.machine, [run], lambda phase: self.progress(f"RTL of {layer.name}: {phase}"))
        self.runs.append(LayerRun(layer.name, planned, program, inputs, values, trace))
        outputs = values.outputs.astype(np.float32)
        if layer.reverse:
            outputs = outputs[::-1]
        return outputs, values.outputs[-1].astype(np.float32), values.cell


def execute(
    network: Network,
    machine: Machine,
    *,
    schedule: str,
    tile: int | None,
    inputs: Mapping[str, np.ndarray] | None = None,
    rtl: bool = False,
    progress: Progress = lambda phase: None,
) -> Execution:
    """Run `network` on `machine`.

    inputs : arrays by input name; None takes the network's own (a sound, or seeded random vectors)
    tile : rows of a tile, None for the best

    Raises ConfigError and NetworkError for what the user can set right, SimulationError when the RTL's bench fails.
    """
    runner = _Runner(machine, schedule, tile, rtl, progress)
    reference = None
    if network.model_file is not None:
        graph = HostGraph.load(network.model_file)
        given = default_inputs(network, graph) if inputs is None else dict(inputs)
        outputs = graph.run(given, runner)
        progress("running the reference")
        reference = graph.reference(given)
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
    if inputs is None:
        generator = np.random.Generator(np.random.PCG64(INPUT_SEED))
        return 2 * generator.random((network.steps, elements), dtype=np.float32) - 1
    if set(inputs) != {"x"}:
        raise NetworkError(f"inputs of network {network.name} must be x float32 (steps, {elements}), not {', '.join(inputs) or 'nothing'}")
    x = inputs["x"]
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != elements or len(x) == 0:
        raise NetworkError(f"input 'x' must be float32 (steps, {elements}), not {x.dtype} {x.shape}")
    require_values("input 'x'", x, float16=True)
    return x


def _run_levels(network: Network, x: np.ndarray, runner: _Runner) -> dict[str, np.ndarray]:
    """Run the levels one after another; return the last level's outputs `y`, and `h` and `c` of all layers in order."""
    layers = iter(network.layers)
    hiddens, cells = [], []
    for level in network.levels:
        results = []
        for _ in level:
            layer = next(layers)
            zeros = np.zeros(layer.hidden, np.float32)
            hidden = zeros if layer.initial_hidden is None else layer.initial_hidden
            cell = zeros if layer.initial_cell is None else layer.initial_cell
            output, last_hidden, last_cell = runner(layer, x, hidden, cell)
            results.append(output)
            hiddens.append(last_hidden)
            cells.append(last_cell)
        x = np.concatenate(results, axis=1)
    return {"y": x, "h": np.stack(hiddens), "c": np.stack(cells)}

