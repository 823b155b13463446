"""Random models of one recurrent node: the reader, the host and a float layer give what onnxruntime gives.

Every model is drawn from a seed that its test's name holds, over all that a node can say; a model that says something without
support must be refused with its name. `test_all_pairs_of_options_are_drawn` counts what the draws reach.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from float_layer import run_all
from onnx_models import DIRECTIONS, GATES, recurrent_model, save

from sharp.model.errors import NetworkError
from sharp.model.machine import load_machine
from sharp.model.onnx_reader import open_session
from sharp.sim.execution import machine_recurrent
from sharp.sim.host import HostGraph

BLOCKS, MODELS_IN_BLOCK = 4, 18
# Weights, x and h are float16 on a machine: each is rounded by up to 2^-11, and sums of some units add such products up.
MACHINE_BOUND = 4e-3
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}
# Name, alpha and beta; those that take none have none.
SUPPORTED = [
    ("Sigmoid", None, None),
    ("Tanh", None, None),
    ("Relu", None, None),
    ("HardSigmoid", 0.2, 0.5),
    ("HardSigmoid", 1 / 6, 0.5),
    ("Affine", 1.0, 0.0),
]
UNSUPPORTED = [
    ("LeakyRelu", 0.01, None),
    ("ThresholdedRelu", 1.0, None),
    ("ScaledTanh", 1.0, 1.0),
    ("Elu", 1.0, None),
    ("Softsign", None, None),
    ("Softplus", None, None),
    ("HardSigmoid", 0.25, 0.5),
    ("Affine", 2.0, 0.0),
]
COUPLING = ("Sigmoid", "HardSigmoid")


@dataclass(frozen=True)
class Draw:
    """A model, inputs for it, what it says by option, and the words of the refusal that it must meet, None where it must run."""

    seed: tuple[int, ...]
    op: str
    hidden: int
    inputs: int
    bound: float
    words: str
    attributes: dict
    given: dict[str, np.ndarray]
    constants: frozenset[str]
    options: dict
    refusal: str | None

    def model(self, **changes):
        states = {name: array for name, array in self.given.items() if name in self.constants}
        options = dict(words=self.words, states=states, seed=self.seed[-1], bound=self.bound, **self.attributes)
        return recurrent_model(self.op, self.inputs, self.hidden, **options | changes)[0]

    @property
    def fed(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.given.items() if name not in self.constants}

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.options}"


def draw(op: str, direction: str, block: int, index: int) -> Draw:
    seed = (list(GATES).index(op), list(DIRECTIONS).index(direction), block, index)
    generator = np.random.default_rng(seed)

    def pick(values):
        return values[generator.integers(len(values))]

    options = {
        "hidden": pick([1, 3, 4, 25, 50, 88]),
        "inputs": pick([1, 3, 5, 7]),
        "batch": pick([1, 2, 3]),
        "steps": pick([1, 2, 5]),
        "bias": pick([True, False]),
        "lengths": pick([True, False]),
        "states": pick(["none", "inputs", "constants"]),
        "clip": pick([None, 0.05, 0.4]),
        "functions": pick(["left out", "given"]),
    }
    if op == "LSTM":
        options |= {"peepholes": pick([True, False]), "coupled": pick([True, False])}
    if op == "GRU":
        options["reset_after"] = pick([True, False])
    attributes: dict = {"direction": direction} if direction != "forward" or pick([True, False]) else {}
    if options["clip"]:
        attributes["clip"] = options["clip"]
    for option, attribute in (("coupled", "input_forget"), ("reset_after", "linear_before_reset")):
        if option in options and (options[option] or pick([True, False])):
            attributes[attribute] = int(options[option])
    refusal = None
    if options["functions"] == "given":
        functions = [pick(SUPPORTED) for _ in range(FUNCTIONS[op] * DIRECTIONS[direction])]
        if options.get("coupled") and pick([True, True, False]):
            functions[:: FUNCTIONS[op]] = [pick([each for each in SUPPORTED if each[0] in COUPLING])] * DIRECTIONS[direction]
        if generator.random() < 1 / 8:
            place = generator.integers(len(functions))
            functions[place] = pick(UNSUPPORTED)
            refusal = f"node 'cell': activations must be .*, not '{functions[place][0]}'"
        elif options["clip"] and any(each[0] == "Affine" for place, each in enumerate(functions) if place % FUNCTIONS[op] < 2):
            refusal = "node 'cell': clip must be absent where Affine activates a gate, not 0"
        elif options.get("coupled") and any(each[0] not in COUPLING for each in functions[:: FUNCTIONS[op]]):
            refusal = "layer cell.*: coupled gates must be activated by"
        attributes |= {
            "activations": [name for name, _, _ in functions],
            "activation_alpha": [alpha for _, alpha, _ in functions if alpha is not None],
            "activation_beta": [beta for _, _, beta in functions if beta is not None],
        }
    steps, batch, state = options["steps"], options["batch"], (DIRECTIONS[direction], options["batch"], options["hidden"])
    given = {"X": generator.uniform(-1, 1, (steps, batch, options["inputs"])).astype(np.float32)}
    if options["lengths"]:
        given["sequence_lens"] = generator.integers(0, steps + 1, batch).astype(np.int32)
    if options["states"] != "none":
        names = [name for name in ("initial_h", "initial_c")[: 2 if op == "LSTM" else 1] if generator.random() < 0.8]
        given |= {name: generator.uniform(-1, 1, state).astype(np.float32) for name in names}
    words = ["X", "W", "R", "B" if options["bias"] else "-"]
    words += [word if word in given else "-" for word in ("sequence_lens", "initial_h", "initial_c")[: 3 if op == "LSTM" else 2]]
    words += ["P"] if options.get("peepholes") else []
    return Draw(
        seed=seed,
        op=op,
        hidden=options["hidden"],
        inputs=options["inputs"],
        # As in trained networks, and so that functions without bounds do not run away.
        bound=min(0.7, 2 / options["hidden"] ** 0.5),
        words=" ".join(words),
        attributes={name: value for name, value in attributes.items() if value != []},
        given=given,
        constants=frozenset(given) - {"X"} if options["states"] == "constants" else frozenset(),
        options=options,
        refusal=refusal,
    )


def draws(op: str, direction: str, block: int) -> list[Draw]:
    return [draw(op, direction, block, index) for index in range(MODELS_IN_BLOCK)]


def assert_close(results, expected, drawn: Draw, bound: float = 3e-6) -> None:
    assert results.keys() == expected.keys()
    for name, wanted in expected.items():
        assert results[name].shape == wanted.shape and np.isfinite(wanted).all(), f"{name} of {drawn}"
        error = np.abs(results[name].astype(np.float64) - wanted).max(initial=0)
        assert error <= bound * max(1, np.abs(wanted).max(initial=0)), f"{name} of {drawn}"


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_random_nodes_equal_onnxruntime_or_are_refused_by_name(tmp_path, op, direction, block):
    for drawn in draws(op, direction, block):
        made = drawn.model()
        path = save(made, tmp_path)
        if drawn.refusal:
            with pytest.raises(NetworkError, match=drawn.refusal):
                HostGraph.load(path)
            continue
        names = [port.name for port in made.graph.output]
        assert_close(HostGraph.load(path).run(drawn.fed, run_all), dict(zip(names, open_session(made).run(names, drawn.fed))), drawn)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_random_nodes_of_layout_1_equal_their_transposed_twins_of_layout_0(tmp_path, op, direction):
    """onnxruntime refuses layout 1, so the twin is what it is held against."""
    for drawn in draws(op, direction, block=0):
        if drawn.refusal:
            continue
        twin = HostGraph.load(save(drawn.model(), tmp_path)).run(drawn.fed, run_all)
        expected = {name: array.transpose(2, 0, 1, 3) if name == "Y" else array.swapaxes(0, 1) for name, array in twin.items()}
        turned = {name: array if name == "sequence_lens" else array.swapaxes(0, 1).copy() for name, array in drawn.given.items()}
        states = {name: turned.pop(name) for name in drawn.constants}
        host = HostGraph.load(save(drawn.model(layout=1, states=states), tmp_path))
        assert_close(host.run(turned, run_all), expected, drawn)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_random_nodes_on_a_machine_stay_near_onnxruntime(tmp_path, op, direction):
    recurrent = machine_recurrent(load_machine("sharp-64"))
    for drawn in draws(op, direction, block=1)[:8]:
        if drawn.refusal is None:
            host = HostGraph.load(save(drawn.model(), tmp_path))
            assert_close(host.run(drawn.fed, recurrent), host.reference(drawn.fed), drawn, MACHINE_BOUND)


def test_all_pairs_of_options_are_drawn():
    all_draws = [each for op in GATES for direction in DIRECTIONS for block in range(BLOCKS) for each in draws(op, direction, block)]
    assert sum(each.refusal is None for each in all_draws) >= 500
    assert sum(each.refusal is not None for each in all_draws) >= 40
    for op in GATES:
        drawn = [each for each in all_draws if each.op == op and each.refusal is None]
        running = [{**each.options, "direction": each.attributes.get("direction")} for each in drawn]
        values = {option: sorted({options[option] for options in running}, key=str) for option in running[0]}
        pairs = Counter(
            ((one, options[one]), (other, options[other])) for options in running for one, other in itertools.combinations(options, 2)
        )
        for one, other in itertools.combinations(values, 2):
            for pair in itertools.product(values[one], values[other]):
                assert pairs[(one, pair[0]), (other, pair[1])], f"{op}: never {one} {pair[0]} with {other} {pair[1]}"
