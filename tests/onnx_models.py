"""Small ONNX models with recurrent nodes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
OUTPUTS = ("Y", "Y_h", "Y_c")
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def random_weights(
    inputs: int, hidden: int, seed: int = 0, directions: int = 1, op: str = "LSTM", bound: float = 0.7
) -> dict[str, np.ndarray]:
    """W, R, B and, of an LSTM, P as an ONNX node takes them, uniform within +-bound."""
    generator, rows = np.random.default_rng(seed), GATES[op] * hidden
    shapes = {"W": (directions, rows, inputs), "R": (directions, rows, hidden), "B": (directions, 2 * rows)}
    if op == "LSTM":
        shapes["P"] = (directions, 3 * hidden)
    return {name: generator.uniform(-bound, bound, shape).astype(np.float32) for name, shape in shapes.items()}


def constant(name: str, array: np.ndarray) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))


def _axes(name: str) -> tuple[list[NodeProto], list[str]]:
    return [constant(f"{name}_axes", np.array([0], np.int64))], [f"{name}_axes"]


def _unsqueezed(name: str, array: np.ndarray) -> list[NodeProto]:
    nodes, axes = _axes(name)
    return [constant(f"{name}_flat", array[0]), *nodes, helper.make_node("Unsqueeze", [f"{name}_flat", *axes], [name])]


def _squeezed(name: str, array: np.ndarray) -> list[NodeProto]:
    nodes, axes = _axes(name)
    return [constant(f"{name}_deep", array[None]), *nodes, helper.make_node("Squeeze", [f"{name}_deep", *axes], [name])]


def _reshaped(name: str, array: np.ndarray) -> list[NodeProto]:
    shape = constant(f"{name}_shape", np.array(array.shape, np.int64))
    return [constant(f"{name}_flat", array.ravel()), shape, helper.make_node("Reshape", [f"{name}_flat", f"{name}_shape"], [name])]


def _transposed(name: str, array: np.ndarray) -> list[NodeProto]:
    return [constant(f"{name}_turned", array.T.copy()), helper.make_node("Transpose", [f"{name}_turned"], [name])]


def _concatenated(name: str, array: np.ndarray) -> list[NodeProto]:
    halves = np.split(array, 2, axis=1)
    nodes = [constant(f"{name}_{k}", half) for k, half in enumerate(halves)]
    return [*nodes, helper.make_node("Concat", [f"{name}_0", f"{name}_1"], [name], axis=1)]


def _cast(name: str, array: np.ndarray) -> list[NodeProto]:
    double = constant(f"{name}_double", array.astype(np.float64))
    cast = helper.make_node("Cast", [f"{name}_double"], [f"{name}_cast"], to=FLOAT)
    return [double, cast, helper.make_node("Identity", [f"{name}_cast"], [name])]


def _chosen(name: str, array: np.ndarray) -> list[NodeProto]:
    """Made by an `If` whose condition is constant."""
    branches = {
        f"{kind}_branch": helper.make_graph([constant(f"{name}_{kind}", value)], kind, [], [value_info(f"{name}_{kind}", array.shape)])
        for kind, value in (("then", array), ("else", -array))
    }
    return [constant(f"{name}_yes", np.array(True)), helper.make_node("If", [f"{name}_yes"], [name], **branches)]


WEIGHT_MAKERS: dict[str, Callable[[str, np.ndarray], list[NodeProto]]] = {
    "Constant": lambda name, array: [constant(name, array)],
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Reshape": _reshaped,
    "Transpose": _transposed,
    "Concat": _concatenated,
    "Cast": _cast,
    "If": _chosen,
}


def value_info(name: str, shape, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def recurrent(op: str, hidden: int, inputs: str = "X W R B", name: str = "cell", outputs=None, **attributes) -> NodeProto:
    """A node of kind `op`; in `inputs`, a dash stands for an input left out."""
    names = ["" if word == "-" else word for word in inputs.split()]
    outputs = (OUTPUTS if op == "LSTM" else OUTPUTS[:2]) if outputs is None else outputs
    return helper.make_node(op, names, list(outputs), name=name, hidden_size=hidden, **attributes)


def lstm(hidden: int, inputs: str = "X W R B", name: str = "cell", outputs=OUTPUTS, **attributes) -> NodeProto:
    return recurrent("LSTM", hidden, inputs, name, outputs, **attributes)


def lstm_outputs(hidden: int) -> list[onnx.ValueInfoProto]:
    return [value_info("Y", ("steps", 1, "batch", hidden)), *(value_info(name, (1, "batch", hidden)) for name in OUTPUTS[1:])]


def model(nodes, inputs, outputs, initialisers=None, opset: int = 17) -> ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in (initialisers or {}).items()]
    graph = helper.make_graph(list(nodes), "main", list(inputs), list(outputs), tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def recurrent_model(
    op: str,
    inputs: int,
    hidden: int,
    *,
    words: str = "X W R B",
    made_by: str = "initialiser",
    states=None,
    seed: int = 0,
    bound: float = 0.7,
    **attributes,
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """One node of kind `op` over the graph input X.

    words : inputs of the node; made_by : "initialiser" or a key of `WEIGHT_MAKERS`; states : initial states and sequence_lens
    that are constants, others are graph inputs. Returns the model and its weights.
    """
    directions = DIRECTIONS.get(attributes.get("direction"), 1)
    weights = random_weights(inputs, hidden, seed, directions, op, bound)
    constants = {**{name: weights[name] for name in weights if name in words.split()}, **(states or {})}
    nodes = [] if made_by == "initialiser" else [n for name, array in constants.items() for n in WEIGHT_MAKERS[made_by](name, array)]
    node = recurrent(op, hidden, words, **attributes)
    ports = node_ports(node, inputs, hidden, directions, constants)
    return model([*nodes, node], *ports, constants if made_by == "initialiser" else {}), weights


def node_ports(node: NodeProto, inputs: int, hidden: int, directions: int, constants) -> tuple[list, list]:
    """Inputs and outputs of a model of this one node, without the inputs that are constants."""
    batch_first = any(attribute.name == "layout" and attribute.i == 1 for attribute in node.attribute)
    state = ("batch", directions, hidden) if batch_first else (directions, "batch", hidden)
    infos = {
        "X": value_info("X", ("batch", "steps", inputs) if batch_first else ("steps", "batch", inputs)),
        "sequence_lens": value_info("sequence_lens", ("batch",), TensorProto.INT32),
        "initial_h": value_info("initial_h", state),
        "initial_c": value_info("initial_c", state),
    }
    outputs = [value_info("Y", ("batch", "steps", directions, hidden) if batch_first else ("steps", directions, "batch", hidden))]
    outputs += [value_info(name, state) for name in OUTPUTS[1:]]
    names = ("X", *node.input[1:])
    return [infos[name] for name in names if name in infos and name not in constants], outputs[: len(node.output)]


def lstm_model(inputs: int, hidden: int, **options) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """One LSTM node; options as for `recurrent_model`."""
    return recurrent_model("LSTM", inputs, hidden, **options)


def quantised_model(
    inputs: int,
    hidden: int,
    *,
    words: str = "X W R B",
    seed: int = 0,
    integers: type = np.int8,
    per_row: bool = False,
    zero_point: int = 0,
    changes=None,
    **attributes,
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """One DynamicQuantizeLSTM of onnxruntime; `changes` replace constants by name or, with None, leave them out.

    Returns the model and the float32 weights that its integers stand for, in the layout of an LSTM node.
    """
    generator = np.random.default_rng(seed)
    directions = DIRECTIONS.get(attributes.get("direction"), 1)
    limits = np.iinfo(integers)
    weights = random_weights(inputs, hidden, seed, directions)
    constants = {name: weights[name] for name in ("B", "P") if name in words.split()}
    size = (directions, 4 * hidden) if per_row else (directions,)
    for name, columns in (("W", inputs), ("R", hidden)):
        stored = generator.integers(limits.min, limits.max + 1, (directions, columns, 4 * hidden)).astype(integers)
        scale = (generator.uniform(0.5, 1, size) * 0.006).astype(np.float32)
        constants |= {name: stored, f"{name}_scale": scale, f"{name}_zero_point": np.full(size, zero_point, integers)}
        for direction in range(directions):
            real = (stored[direction].astype(np.float64) - zero_point) * scale[direction]
            weights[name][direction] = real.T.astype(np.float32)
    constants = {name: array for name, array in {**constants, **(changes or {})}.items() if array is not None}
    given = [*words.split(), *7 * ["-"]][:8]
    scales = [name if name in constants else "" for name in ("W_scale", "W_zero_point", "R_scale", "R_zero_point")]
    node = helper.make_node(
        "DynamicQuantizeLSTM",
        [*("" if word == "-" else word for word in given), *scales],
        list(OUTPUTS),
        name="cell",
        domain="com.microsoft",
        hidden_size=hidden,
        **attributes,
    )
    made = model([node], *node_ports(node, inputs, hidden, directions, constants), constants)
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made, weights


def branch(nodes, hidden: int, kind: str, initialisers=None) -> GraphProto:
    """A branch of an `If` whose outputs are an LSTM's, under names of its own."""
    tensors = [numpy_helper.from_array(array, name) for name, array in (initialisers or {}).items()]
    outputs = [helper.make_node("Identity", [f"{kind}_{name}"], [f"{kind}_{name}_out"]) for name in OUTPUTS]
    infos = [value_info(f"{kind}_{name}_out", None) for name in OUTPUTS]
    return helper.make_graph([*nodes, *outputs], kind, [], infos, tensors)


def branch_lstm(hidden: int, kind: str, inputs: str) -> NodeProto:
    return lstm(hidden, inputs, name=f"cell_{kind}", outputs=[f"{kind}_{name}" for name in OUTPUTS])


def nested_if_model(inputs: int, hidden: int, *, outer_weights: bool = True) -> tuple[ModelProto, dict[str, dict[str, np.ndarray]]]:
    """An LSTM in each of three branches: an `If` on the input `fast`, and inside its else branch one on the input `loud`.

    Returns the model and the weights by branch: then, deep_then, deep_else.
    """
    kinds = ("then", "deep_then", "deep_else")
    weights = {kind: random_weights(inputs, hidden, seed) for seed, kind in enumerate(kinds)}
    named = {kind: {f"{name}_{kind}": array for name, array in weights[kind].items()} for kind in kinds}
    outside = {name: array for kind in kinds for name, array in named[kind].items()} if outer_weights else {}

    def cell(kind: str) -> GraphProto:
        node = branch_lstm(hidden, kind, f"X W_{kind} R_{kind} B_{kind}")
        return branch([node], hidden, kind, None if outer_weights else named[kind])

    inner_outputs = [f"else_{name}" for name in OUTPUTS]
    inner = helper.make_node("If", ["loud"], inner_outputs, then_branch=cell("deep_then"), else_branch=cell("deep_else"))
    otherwise = branch([inner], hidden, "else")
    outer = helper.make_node("If", ["fast"], list(OUTPUTS), then_branch=cell("then"), else_branch=otherwise)
    ports = [value_info("X", ("steps", 1, inputs)), value_info("fast", (), BOOL), value_info("loud", (), BOOL)]
    return model([outer], ports, lstm_outputs(hidden), outside), weights


def save(made: ModelProto, tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path
