"""Reads recurrent layers with their weights out of ONNX models: LSTM, GRU, RNN and onnxruntime's DynamicQuantizeLSTM.

Three rules. Each direction of a node is a layer with the gates and semantics of `model/layer.py`, and its function is
onnxruntime's; a quantised node's layer has the float32 weights that its integers stand for. Weights may be made by any
nodes whose inputs are constants, inside `If` branches too; onnxruntime folds them. What is not supported is refused by the
node's name, never ignored, and whatever the ONNX libraries raise becomes one line of `NetworkError`. Nodes of layout 1 are
rewritten to layout 0, which is all that onnxruntime knows too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner

from .arithmetic import Activation
from .errors import NetworkError, one_line_errors
from .layer import GATES, STANDARD_ACTIVATIONS, Layer

_RECURRENT = ("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM", "AttnLSTM")
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P", "W_scale", "W_zero_point", "R_scale", "R_zero_point")
_OUTPUTS = ("Y", "Y_h", "Y_c")
_ATTRIBUTES = {
    "hidden_size": AttributeProto.INT,
    "direction": AttributeProto.STRING,
    "activations": AttributeProto.STRINGS,
    "activation_alpha": AttributeProto.FLOATS,
    "activation_beta": AttributeProto.FLOATS,
    "clip": AttributeProto.FLOAT,
}
# ONNX's directions as the layers they stand for: is it a reverse one.
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# ONNX's activations by name in lower case, as onnxruntime compares them: those that take no alpha and beta, and those that do,
# with the pair taken where the node gives none and the function for each pair that is supported.
_FUNCTIONS = {"sigmoid": Activation.SIGMOID, "tanh": Activation.TANH, "relu": Activation.RELU}
_SCALED_FUNCTIONS = {
    "hardsigmoid": ((1 / 5, 0.5), {(1 / 5, 0.5): Activation.HARD_SIGMOID_FIFTH, (1 / 6, 0.5): Activation.HARD_SIGMOID_SIXTH}),
    "affine": ((None, None), {(1.0, 0.0): Activation.IDENTITY}),
}
_SUPPORTED_FUNCTIONS = "Sigmoid, Tanh, Relu, HardSigmoid (alpha 1/5 or 1/6, beta 1/2) or Affine (alpha 1, beta 0)"
# Transpositions of a node's tensors from layout 1 to layout 0, and of its outputs back.
_TIME_FIRST = {"X": (1, 0, 2), "initial_h": (1, 0, 2), "initial_c": (1, 0, 2)}
_BATCH_FIRST = {"Y": (2, 0, 1, 3), "Y_h": (1, 0, 2), "Y_c": (1, 0, 2)}
_PROTOBUF_LIMIT_BYTES = 2**31 - 1

Level = tuple[Layer, ...]


@dataclass(frozen=True)
class _Kind:
    """What tells one recurrent operator from another.

    order : the place of each of our gates among the operator's; attributes : those that not all operators have, all integers
    """

    cell: str
    order: tuple[int, ...]
    attributes: tuple[str, ...]
    quantised: bool = False


_KINDS = {
    "LSTM": _Kind("lstm", (0, 2, 3, 1), ("input_forget", "layout")),
    "GRU": _Kind("gru", (0, 1, 2), ("linear_before_reset", "layout")),
    "RNN": _Kind("rnn", (0,), ("layout",)),
    "com.microsoft.DynamicQuantizeLSTM": _Kind("lstm", (0, 2, 3, 1), ("input_forget",), quantised=True),
}
_SUPPORTED_KINDS = ", ".join(_KINDS)


@dataclass(eq=False)
class Scope:
    """One graph of a model, the main one or a branch of an `If`, as the host executes it.

    constants : tensors known without running a node: initialisers and `Constant` nodes
    levels : recurrent nodes by their index in `nodes`: a layer for each direction, forward before reverse
    branches : `If` nodes that hold recurrent nodes, by index; {condition: branch}, without a branch that is never taken
    """

    graph: GraphProto
    model: ModelProto
    outer: "Scope | None" = None
    constants: dict[str, TensorProto] = field(default_factory=dict)
    levels: dict[int, Level] = field(default_factory=dict)
    branches: dict[int, dict[bool, "Scope"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants.update((tensor.name, tensor) for tensor in self.graph.initializer)
        for node in self.nodes:
            value = next((a.t for a in node.attribute if node.op_type == "Constant" and a.name == "value"), None)
            if value is not None:
                self.constants[node.output[0]] = value

    @cached_property
    def nodes(self) -> tuple[NodeProto, ...]:
        return tuple(self.graph.node)

    @cached_property
    def _producers(self) -> dict[str, int]:
        return {name: index for index, node in enumerate(self.nodes) for name in node.output if name}

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else self.outer.depth + 1

    def scope_of(self, name: str) -> "Scope | None":
        """The innermost scope, this one or around it, in which a constant or a node has this name."""
        if name in self.constants or name in self._producers:
            return self
        return self.outer.scope_of(name) if self.outer else None

    def found_levels(self) -> list[Level]:
        """Levels in the order in which they run; of two branches, those of the second that the first does not have."""
        found = []
        for index in sorted({*self.levels, *self.branches}):
            if index in self.levels:
                found.append(self.levels[index])
                continue
            known: set[tuple[str, ...]] = set()
            for branch in self.branches[index].values():
                levels = [(tuple(layer.digest for layer in level), level) for level in branch.found_levels()]
                found.extend(level for digests, level in levels if digests not in known)
                known.update(digests for digests, _ in levels)
        return found

    def fold(self, name: str) -> np.ndarray | str:
        """Compute a value out of constants alone; where that cannot be, return what it depends on, in words."""
        needed, constants, waiting = {}, {}, [(name, self)]
        while waiting:
            wanted, scope = waiting.pop()
            owner = scope.scope_of(wanted)
            if owner is None:
                return f"the input {wanted!r}"
            if wanted in owner.constants:
                constants[wanted] = owner.constants[wanted]
                continue
            index = owner._producers[wanted]
            node = owner.nodes[index]
            if node.op_type in _RANDOM:
                return f"the random node {node_name(node)!r}"
            if (owner.depth, index) not in needed:
                needed[owner.depth, index] = node
                waiting.extend((used, owner) for used in used_names(node))
        if name in constants:
            return onnx.numpy_helper.to_array(constants[name])
        nodes = [needed[place] for place in sorted(needed)]
        return make_session(self.model, nodes, constants, {}, [name]).run([name], {})[0]


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A checked model: the file, the whole of it with functions inlined and external data read, and its main scope."""

    path: Path
    proto: ModelProto
    main: Scope


def node_name(node: NodeProto) -> str:
    """The node's name, or its first output where it has none."""
    return node.name or next((name for name in node.output if name), node.op_type)


def used_names(node: NodeProto) -> set[str]:
    """Names of values that a node reads, those that its inner graphs take from around them included."""
    names = {name for name in node.input if name}
    for graph in _inner_graphs(node):
        inside = {value.name for value in (*graph.input, *graph.initializer)}
        for inner in graph.node:
            names |= used_names(inner) - inside
            inside.update(inner.output)
        names |= {value.name for value in graph.output} - inside
    return names


def make_session(
    model: ModelProto,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, TensorProto],
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str],
) -> onnxruntime.InferenceSession:
    """Make an onnxruntime session of some nodes of a model.

    constants : values that stay, by name; feeds : arrays whose types the session's inputs have; outputs : names wanted
    """
    graph = GraphProto(name="part")
    graph.node.extend(nodes)
    for name, tensor in constants.items():
        # `Constant` nodes among `nodes` make their value themselves.
        if not any(name in node.output for node in nodes):
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = name
    for name, array in feeds.items():
        graph.input.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    part = ModelProto(ir_version=model.ir_version, graph=graph)
    part.opset_import.extend(model.opset_import)
    return open_session(part)


def open_session(model: ModelProto) -> onnxruntime.InferenceSession:
    """Open a quiet onnxruntime session on one thread, so that its sums are in one order."""
    # What goes wrong is raised; onnxruntime would print it too, through a logger of its own and on its second try.
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0)


def read_levels(path: Path) -> tuple[Level, ...]:
    """Read all recurrent nodes of an ONNX file in the order in which they run: a layer for each direction, forward before reverse.

    Where the inputs choose between branches of an `If`, nodes of both are listed, equal ones once. `NetworkError` as for
    `read_model`.
    """
    return tuple(read_model(path).main.found_levels())


def read_model(path: Path) -> OnnxModel:
    """Read and check an ONNX file and all recurrent nodes in it; `NetworkError` for a file or a node that is not supported."""
    path = Path(path)
    proto = _read_proto(path)
    with one_line_errors(str(path)):
        main = Scope(graph=proto.graph, model=proto)
        _Reader(str(path)).read(main)
        if not main.found_levels():
            raise NetworkError(f"{path}: {_why_no_layer(proto)}")
    return OnnxModel(path=path, proto=proto, main=main)


def _read_proto(path: Path) -> ModelProto:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _PROTOBUF_LIMIT_BYTES:
            raise NetworkError(f"{path}: must be at most 2 GiB, the limit of a protobuf message, not {size_bytes} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise NetworkError(f"{path}: cannot be read: {error.strerror}") from None
    damaged = f"{path}: not an ONNX model, or a damaged one"
    with one_line_errors(damaged):
        proto = onnx.load_model_from_string(content)
    with one_line_errors(f"{path}: external data"):
        onnx.load_external_data_for_model(proto, str(path.parent))
    with one_line_errors(damaged):
        onnx.checker.check_model(proto)
        _check_names(proto.graph)
    for opset in proto.opset_import:
        newest = onnx.defs.onnx_opset_version()
        if opset.domain in ("", "ai.onnx") and opset.version > newest:
            raise NetworkError(f"{path}: opset must be at most {newest}, the newest that this onnx package knows, not {opset.version}")
    with one_line_errors(f"{path}: functions"):
        proto = inliner.inline_local_functions(proto) if proto.functions else proto
    with one_line_errors(str(path)):
        _put_time_first(proto.graph, {name for node in _all_nodes(proto.graph) for name in (*node.input, *node.output)})
    return proto


def _put_time_first(graph: GraphProto, taken: set[str]) -> None:
    """Rewrite recurrent nodes of layout 1 to layout 0, between transpositions whose values get names that are not `taken`."""
    nodes = []
    for node in graph.node:
        for inner in _inner_graphs(node):
            _put_time_first(inner, taken)
        layout = next((a for a in node.attribute if a.name == "layout" and a.i == 1), None)
        kind = _KINDS.get(_kind(node))
        if layout is None or kind is None or "layout" not in kind.attributes:
            nodes.append(node)
            continue
        node.name = node_name(node)
        layout.i = 0
        before = _transpose(node.input, _INPUTS, _TIME_FIRST, taken)
        after = _transpose(node.output, _OUTPUTS, _BATCH_FIRST, taken)
        nodes += [helper.make_node("Transpose", [old], [new], perm=perm) for old, new, perm in before]
        nodes.append(node)
        nodes += [helper.make_node("Transpose", [new], [old], perm=perm) for old, new, perm in after]
    if len(nodes) > len(graph.node):
        rewritten = GraphProto(node=nodes)
        del graph.node[:]
        graph.node.extend(rewritten.node)


def _transpose(names, meanings: Sequence[str], perms: Mapping[str, tuple[int, ...]], taken: set[str]) -> list[tuple]:
    """Rename a node's inputs or outputs that are to be transposed; return (old name, new name, permutation) of each."""
    renamed = []
    for place, (old, meaning) in enumerate(zip(list(names), meanings)):
        if old and meaning in perms:
            new = f"{old}.time_first"
            while new in taken:
                new += "_"
            taken.add(new)
            names[place] = new
            renamed.append((old, new, perms[meaning]))
    return renamed


def _check_names(graph: GraphProto) -> None:
    """Check what the checker leaves out: that names are text. Protobuf hands out bytes where they are not."""
    for node in _all_nodes(graph):
        for name in (node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute)):
            if not isinstance(name, str):
                raise ValueError(f"the name {name!r} is not UTF-8")


def _inner_graphs(node: NodeProto) -> list[GraphProto]:
    single = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    return single + [graph for a in node.attribute if a.type == AttributeProto.GRAPHS for graph in a.graphs]


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for inner in _inner_graphs(node):
            yield from _all_nodes(inner)


def _why_no_layer(proto: ModelProto) -> str:
    kinds = {node.op_type for node in _all_nodes(proto.graph)}
    if {"Sigmoid", "Tanh"} <= kinds and kinds & {"MatMul", "Gemm"}:
        around = " inside a loop" if kinds & {"Loop", "Scan"} else ""
        return f"holds no recurrent node but MatMul or Gemm, Sigmoid and Tanh{around}: a decomposed LSTM or GRU, which is not supported"
    if kinds & set(_RECURRENT):
        return "holds recurrent nodes only in branches that are never taken"
    return f"holds no recurrent node (supported: {_SUPPORTED_KINDS}); its nodes are {', '.join(sorted(kinds)) or 'none'}"


class _Reader:
    """Walks the scopes of one file, checks every recurrent node and turns it into a layer with a name of its own."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._names: set[str] = set()

    def read(self, scope: Scope) -> None:
        if scope.graph.sparse_initializer:
            name = scope.graph.sparse_initializer[0].values.name
            raise NetworkError(f"{self._origin}: initialiser {name!r} is sparse, which is not supported")
        for index, node in enumerate(scope.nodes):
            if node.op_type in _RECURRENT:
                self._require(node, _kind(node) in _KINDS, "kind", _SUPPORTED_KINDS, _kind(node))
                scope.levels[index] = self._level(scope, node, _KINDS[_kind(node)])
            elif any(inner.op_type in _RECURRENT for graph in _inner_graphs(node) for inner in _all_nodes(graph)):
                self._require(node, node.op_type == "If", "node around a recurrent node", "If", _kind(node))
                self._read_if(scope, index, node)

    def _read_if(self, scope: Scope, index: int, node: NodeProto) -> None:
        condition = scope.fold(node.input[0])
        graphs = {attribute.name == "then_branch": attribute.g for attribute in node.attribute}
        taken = (True, False) if isinstance(condition, str) else (bool(condition.item()),)
        scope.branches[index] = {value: Scope(graph=graphs[value], model=scope.model, outer=scope) for value in taken}
        for branch in scope.branches[index].values():
            count = len(branch.graph.output)
            self._require(node, count == len(node.output), "outputs of a branch", f"{len(node.output)}, as many as the node's", count)
            self.read(branch)

    def _level(self, scope: Scope, node: NodeProto, kind: _Kind) -> Level:
        given = {name: value for name, value in zip(_INPUTS, node.input) if value}
        self._require(node, "X" in given, "X", "given", None)
        self._require(node, len(node.input) <= len(_INPUTS), "inputs", f"at most {len(_INPUTS)}", len(node.input))
        attributes = self._attributes(node, kind)
        directions = self._directions(node, attributes)
        count = len(directions)
        activations = self._activations(node, kind, attributes, count)
        # Arguments of phi0 and phi1 are limited on their way into a function, which the identity does not take.
        limited = all(Activation.IDENTITY not in functions[:2] for functions in activations)
        clip = attributes.get("clip")
        self._require(node, limited or clip is None, "clip", "absent where Affine activates a gate", clip)
        input_kernels, recurrent_kernels = self._kernels(scope, node, kind, given, count)
        hidden = recurrent_kernels.shape[2]
        if "hidden_size" in attributes:
            self._require(node, attributes["hidden_size"] == hidden, "hidden_size", f"{hidden}, as R has it", attributes["hidden_size"])
        shapes = {"B": (count, 2 * GATES[kind.cell] * hidden), "P": (count, 3 * hidden)}
        vectors = {name: self._constant(scope, node, name, given) for name in shapes if name in given}
        for name, array in vectors.items():
            self._require(node, array.shape == shapes[name], name, f"of the shape {shapes[name]}", array.shape)
        states = {name: self._initial(scope, node, name, given, (count, "batch", hidden)) for name in ("initial_h", "initial_c")}
        reset_after = kind.cell != "gru" or attributes.get("linear_before_reset") == 1
        apart = kind.cell == "gru" and reset_after
        biases = [_biases(stored, kind.order, apart) for stored in vectors["B"]] if "B" in vectors else [(None, None)] * count
        name = self._unique(node_name(node))
        try:
            return tuple(
                Layer(
                    name=self._unique(f"{name}.reverse") if index else name,
                    cell=kind.cell,
                    input_kernel=_reordered(input_kernels[index], kind.order),
                    recurrent_kernel=_reordered(recurrent_kernels[index], kind.order),
                    bias=biases[index][0],
                    candidate_bias=biases[index][1],
                    # ONNX stores p_i, p_o, p_f.
                    peepholes=_reordered(vectors["P"][index], (0, 2, 1)).reshape(3, hidden) if "P" in vectors else None,
                    reverse=reverse,
                    coupled=attributes.get("input_forget") == 1,
                    reset_after=reset_after,
                    clip=clip,
                    activations=activations[index],
                    initial_hidden=None if states["initial_h"] is None else states["initial_h"][index],
                    initial_cell=None if states["initial_c"] is None else states["initial_c"][index],
                )
                for index, reverse in enumerate(directions)
            )
        except NetworkError as error:
            raise NetworkError(f"{self._origin}: {error}") from None

    def _directions(self, node: NodeProto, attributes: Mapping) -> tuple[bool, ...]:
        direction = attributes.get("direction", b"forward").decode(errors="replace")
        self._require(node, direction in _DIRECTIONS, "direction", "forward, reverse or bidirectional", direction)
        return _DIRECTIONS[direction]

    def _attributes(self, node: NodeProto, kind: _Kind) -> dict[str, object]:
        """Return the node's attributes, whose names and types onnx's checker knows for ONNX's own operators alone."""
        types = _ATTRIBUTES | dict.fromkeys(kind.attributes, AttributeProto.INT)
        type_name = AttributeProto.AttributeType.Name
        attributes = {}
        for attribute in node.attribute:
            name, value = attribute.name, helper.get_attribute_value(attribute)
            self._require(node, name in types, name, f"absent from {_kind(node)}", value)
            got = type_name(attribute.type)
            self._require(node, attribute.type == types[name], name, f"of the type {type_name(types[name])}", got, quote=False)
            attributes[name] = value
        for name in ("input_forget", "linear_before_reset"):
            self._require(node, attributes.get(name, 0) in (0, 1), name, "0 or 1", attributes.get(name))
        self._require(node, attributes.get("layout", 0) == 0, "layout", "0 or 1", attributes.get("layout"))
        return attributes

    def _activations(self, node: NodeProto, kind: _Kind, attributes: Mapping, count: int) -> list[tuple[Activation, ...]]:
        """Return the functions of each direction. Those that take an alpha or a beta take them off the node's lists in turn."""
        standard = STANDARD_ACTIVATIONS[kind.cell]
        names = [name.decode(errors="replace") for name in attributes.get("activations", ())]
        self._require(node, len(names) in (0, len(standard) * count), "activations", f"{len(standard)} for each direction", names)
        lists = {name: list(attributes.get(name, ())) for name in ("activation_alpha", "activation_beta")}
        functions = [self._activation(node, name, *lists.values()) for name in names] or standard * count
        for name, left in lists.items():
            self._require(node, not left, name, "no longer than what the activations take of it", attributes.get(name))
        return [tuple(functions[start : start + len(standard)]) for start in range(0, len(functions), len(standard))]

    def _activation(self, node: NodeProto, name: str, alphas: list[float], betas: list[float]) -> Activation:
        function, got = _FUNCTIONS.get(name.lower()), repr(name)
        if name.lower() in _SCALED_FUNCTIONS:
            (alpha, beta), supported = _SCALED_FUNCTIONS[name.lower()]
            pair = (alphas.pop(0) if alphas else alpha, betas.pop(0) if betas else beta)
            got = f"{name!r} (alpha {pair[0]}, beta {pair[1]})"
            if None not in pair:
                # Attributes are rounded to float32.
                function = next((function for known, function in supported.items() if np.allclose(pair, known, rtol=1e-6, atol=0)), None)
        self._require(node, function is not None, "activations", _SUPPORTED_FUNCTIONS, got, quote=False)
        return function

    def _kernels(self, scope: Scope, node: NodeProto, kind: _Kind, given: Mapping[str, str], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return W : float32[directions, G H, D] and R : float32[directions, G H, H], gates in ONNX's order."""
        dtypes = ("int8", "uint8") if kind.quantised else ("float32",)
        stored = {name: self._constant(scope, node, name, given, dtypes) for name in ("W", "R")}
        gates, columns = GATES[kind.cell], 1 if kind.quantised else 2
        sizes = ["...", f"{gates} x hidden" if gates > 1 else "hidden"]
        pattern = f"[{', '.join([str(count), *(sizes if kind.quantised else sizes[::-1])])}]"
        for name, array in stored.items():
            self._require(node, array.ndim == 3, name, f"of the shape {pattern}", array.shape)
        rows = gates * stored["R"].shape[columns]
        for name, array in stored.items():
            width = array.shape[columns]
            shape = (count, width, rows) if kind.quantised else (count, rows, width)
            self._require(node, array.shape == shape, name, f"of the shape {shape}", array.shape)
        if kind.quantised:
            stored = {name: self._dequantised(scope, node, name, given, array) for name, array in stored.items()}
        return stored["W"], stored["R"]

    def _dequantised(self, scope: Scope, node: NodeProto, name: str, given: Mapping[str, str], integers: np.ndarray) -> np.ndarray:
        """Return what int8 or uint8[directions, columns, rows] stand for as float32[directions, rows, columns].

        Scale and zero point are those of a direction or, two-dimensional, of each row.
        """
        scale = self._constant(scope, node, f"{name}_scale", given)
        zero_point = self._constant(scope, node, f"{name}_zero_point", given, (integers.dtype.name,))
        count, _, rows = integers.shape
        for what, array in ((f"{name}_scale", scale), (f"{name}_zero_point", zero_point)):
            fits = array.shape in ((count,), (count, rows))
            self._require(node, fits, what, f"of the shape ({count},) or ({count}, {rows})", array.shape)
        scale, zero_point = scale.reshape(count, 1, -1), zero_point.reshape(count, 1, -1)
        # A weight that is not finite is refused by the layer.
        with np.errstate(over="ignore", invalid="ignore"):
            return ((integers.astype(np.float32) - zero_point.astype(np.float32)) * scale).swapaxes(1, 2)

    def _constant(
        self, scope: Scope, node: NodeProto, name: str, given: Mapping[str, str], dtypes: Sequence[str] = ("float32",)
    ) -> np.ndarray:
        value = self._fold(scope, node, name, given)
        self._require(node, isinstance(value, np.ndarray), name, "constant", f"computed at run time from {value}", quote=False)
        self._require(node, value.dtype.name in dtypes, name, " or ".join(dtypes), value.dtype.name, quote=False)
        return value

    def _initial(self, scope: Scope, node: NodeProto, name: str, given: Mapping[str, str], shape: tuple) -> np.ndarray | None:
        """Return states that belong to the layers, float32[directions, hidden]: constants for a batch of one."""
        value = self._fold(scope, node, name, given) if name in given else None
        if not isinstance(value, np.ndarray):
            return None
        self._require(node, value.dtype == np.float32, name, "float32", value.dtype.name, quote=False)
        fits = value.ndim == 3 and value.size > 0 and value.shape[::2] == shape[::2]
        self._require(node, fits, name, f"of the shape ({', '.join(map(str, shape))})", value.shape)
        return value[:, 0] if value.shape[1] == 1 else None

    def _fold(self, scope: Scope, node: NodeProto, name: str, given: Mapping[str, str]) -> np.ndarray | str:
        self._require(node, name in given, name, "given", None)
        with one_line_errors(f"{self._origin}: node {node_name(node)!r}: {name} cannot be computed"):
            return scope.fold(given[name])

    def _require(self, node: NodeProto, good: bool, what: str, allowed: str, got: object, quote: bool = True) -> None:
        if not good:
            shown = repr(got) if quote else got
            raise NetworkError(f"{self._origin}: node {node_name(node)!r}: {what} must be {allowed}, not {shown}")

    def _unique(self, name: str) -> str:
        free, count = name, 1
        while free in self._names:
            count += 1
            free = f"{name}.{count}"
        self._names.add(free)
        return free


def _kind(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _reordered(rows: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Return the equal blocks of `rows` in another order."""
    blocks = np.split(rows, len(order))
    return np.concatenate([blocks[place] for place in order])


def _biases(stored: np.ndarray, order: Sequence[int], apart: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Add up the input and the recurrent bias of one direction, float32[2 G H]: return `bias` and `candidate_bias` of the layer.

    apart : the recurrent bias of the last gate is the candidate's and not added
    """
    input_bias, recurrent_bias = (_reordered(half, order) for half in np.split(stored, 2))
    candidate_bias = None
    if apart:
        gates, candidate_bias = np.split(recurrent_bias, [-(len(recurrent_bias) // len(order))])
        recurrent_bias = np.concatenate((gates, np.zeros_like(candidate_bias)))
    # A sum that is not finite is refused by the layer.
    with np.errstate(over="ignore", invalid="ignore"):
        return input_bias + recurrent_bias, candidate_bias
