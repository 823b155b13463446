"""The host's share of an ONNX model: everything but the recurrent nodes, which go to the accelerator.

Three rules. The graph is run in its own order, cut at each recurrent node and at each `If` that holds one; onnxruntime runs
the pieces between. Which branch is taken is known when its condition has been computed. Everything that enters a
recurrent node is checked, so that no NaN or infinity reaches the accelerator. Its tasks are handed over together: one for
each direction of the node and each element of the batch, over the element's valid steps, in the order of the walk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, ValueInfoProto

from sharp.model.errors import NetworkError, one_line_errors
from sharp.model.layer import require_values
from sharp.model.onnx_reader import (
    Level,
    OnnxModel,
    Scope,
    make_session,
    node_name,
    open_session,
    read_model,
    used_names,
)
from sharp.model.sequence import Recurrent, Task

Values = dict[str, "np.ndarray | TensorProto"]


@dataclass(frozen=True)
class Port:
    """An input or output of a model. Dimensions are numbers, names of free dimensions, or None for any."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: ValueInfoProto) -> "Port":
        if not value.type.HasField("tensor_type"):
            raise NetworkError(f"{value.name!r} must be a tensor, not of kind {value.type.WhichOneof('value')}")
        tensor = value.type.tensor_type
        shape = None
        if tensor.HasField("shape"):
            # Exporters write an unknown dimension as a name, as nothing or as 0.
            shape = tuple(dim.dim_param or dim.dim_value or None for dim in tensor.shape.dim)
        return cls(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), shape)

    def __str__(self) -> str:
        shape = "any shape" if self.shape is None else "(" + ", ".join(str(dim or "any") for dim in self.shape) + ")"
        return f"{self.dtype} {shape}"


class HostGraph:
    """An ONNX model whose recurrent nodes somebody else computes.

    inputs, outputs : ports, without the inputs that have a default
    layers : the layers of the levels that `read_levels` lists
    """

    def __init__(self, model: OnnxModel) -> None:
        self.path = model.path
        self.layers = tuple(layer for level in model.main.found_levels() for layer in level)
        self._model = model
        self._sessions: dict[tuple, onnxruntime.InferenceSession] = {}
        with one_line_errors(str(model.path)):
            self.inputs = tuple(Port.of(value) for value in model.proto.graph.input if value.name not in model.main.constants)
            self.outputs = tuple(Port.of(value) for value in model.proto.graph.output)

    @classmethod
    def load(cls, path: Path | str) -> "HostGraph":
        """Read a model; `NetworkError` as for `read_model`, or for an input or output that is no tensor."""
        return cls(read_model(Path(path)))

    def check_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Raise `NetworkError` for the first input that is missing, unknown, or of a wrong type, shape or value."""
        known = ", ".join(f"{port.name} {port}" for port in self.inputs)
        for name in inputs:
            if name not in [port.name for port in self.inputs]:
                raise NetworkError(f"input {name!r} is unknown; inputs are {known}")
        sizes: dict[str, tuple[int, str]] = {}
        for port in self.inputs:
            if port.name not in inputs:
                raise NetworkError(f"input {port.name!r} ({port}) is missing; inputs are {known}")
            self._check_input(port, inputs[port.name], sizes)

    def _check_input(self, port: Port, array: np.ndarray, sizes: dict[str, tuple[int, str]]) -> None:
        where = f"input {port.name!r}"
        if not isinstance(array, np.ndarray) or array.dtype != port.dtype:
            raise NetworkError(f"{where} must be {port}, not {getattr(array, 'dtype', type(array).__name__)}")
        fits = port.shape is None or len(port.shape) == array.ndim and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(port.shape, array.shape)
        )
        if not fits:
            raise NetworkError(f"{where} must be of the shape {port}, not {array.shape}")
        if array.size == 0:
            raise NetworkError(f"{where} must not be empty, not of shape {array.shape}")
        for dim, size in zip(port.shape or (), array.shape):
            if isinstance(dim, str):
                before, other = sizes.setdefault(dim, (size, port.name))
                if size != before:
                    raise NetworkError(f"{where} must have {dim} = {before} as input {other!r} has it, not {size}")
        if array.dtype.kind == "f":
            require_values(where, array, float16=False)

    def run(self, inputs: Mapping[str, np.ndarray], recurrent: Recurrent) -> dict[str, np.ndarray]:
        """Run the model with `recurrent` in the place of its recurrent nodes.

        recurrent(tasks) returns a result for each task, in the same order. It is called once for each recurrent node that
        runs, in the order of the graph, with all tasks of the node: the forward direction's first, and of a direction one for
        each element of the batch that `sequence_lens` leaves any steps; where no element has any, it is not called.
        Returns the model's outputs by name. `NetworkError` for inputs that `check_inputs` refuses, for a node that
        fails, and for values that a recurrent node may not be given.
        """
        self.check_inputs(inputs)
        results = self._run_scope(self._model.main, dict(inputs), recurrent)
        return {port.name: array for port, array in zip(self.outputs, results)}

    def reference(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the whole model in onnxruntime and return its outputs by name; errors as for `run`."""
        self.check_inputs(inputs)
        names = [port.name for port in self.outputs]
        with one_line_errors(str(self.path)):
            return dict(zip(names, self._whole.run(names, dict(inputs))))

    @cached_property
    def _whole(self) -> onnxruntime.InferenceSession:
        return open_session(self._model.proto)

    def _run_scope(self, scope: Scope, outer: Values, recurrent: Recurrent) -> list[np.ndarray]:
        values: Values = {**outer, **scope.constants}
        start = 0
        for stop in [*sorted({*scope.levels, *scope.branches}), len(scope.nodes)]:
            # Around the host's nodes alone: errors of `recurrent` are its caller's.
            with one_line_errors(str(self.path)):
                self._run_nodes(scope, start, stop, values)
            start = stop + 1
            if stop in scope.levels:
                results = self._run_level(scope.levels[stop], scope.nodes[stop], values, recurrent)
            elif stop in scope.branches:
                with one_line_errors(f"{self.path}: condition of {node_name(scope.nodes[stop])!r}"):
                    condition = bool(_array(values[scope.nodes[stop].input[0]]).item())
                results = self._run_scope(scope.branches[stop][condition], values, recurrent)
            else:
                break
            values.update((name, result) for name, result in zip(scope.nodes[stop].output, results) if name)
        return [_array(values[value.name]) for value in scope.graph.output]

    def _run_nodes(self, scope: Scope, start: int, stop: int, values: Values) -> None:
        """Run nodes `start` to `stop` and add to `values` what later nodes or the scope's outputs need of them."""
        nodes = [node for node in scope.nodes[start:stop] if not set(node.output) <= scope.constants.keys()]
        made = {name for node in nodes for name in node.output}
        later = {value.name for value in scope.graph.output}.union(*(used_names(node) for node in scope.nodes[stop:]))
        outputs = sorted(made & later)
        if not outputs:
            return
        used = set().union(*(used_names(node) for node in nodes)) - made
        constants = {name: values[name] for name in used if isinstance(values[name], TensorProto)}
        feeds = {name: values[name] for name in used - constants.keys()}
        # The nodes run again with the same types: a session is worth keeping.
        key = (id(scope), start, *sorted((name, array.dtype.str) for name, array in feeds.items()))
        if key not in self._sessions:
            self._sessions[key] = make_session(self._model.proto, nodes, constants, feeds, outputs)
        values.update(zip(outputs, self._sessions[key].run(outputs, feeds)))

    def _run_level(self, level: Level, node: NodeProto, values: Values, recurrent: Recurrent) -> tuple[np.ndarray, ...]:
        """Run a recurrent node; return its Y, Y_h and, of an LSTM, Y_c.

        Y is zero past an element's length; an element of length 0 makes no task, and its states are zero, as in onnxruntime.
        """
        where = f"node {node_name(node)!r}"
        names = [*node.input, *[""] * 7]
        inputs, outputs, hidden = level[0].inputs, level[0].outputs, level[0].hidden
        x = _array(values[names[0]])
        if x.dtype != np.float32 or x.ndim != 3 or x.shape[2] != inputs or 0 in x.shape:
            raise NetworkError(f"{where}: X must be float32 (steps, batch, {inputs}), not {x.dtype} {x.shape}")
        steps, batch = x.shape[:2]
        lengths = _array(values[names[4]]) if names[4] else np.full(batch, steps, np.int32)
        if lengths.dtype != np.int32 or lengths.shape != (batch,):
            raise NetworkError(f"{where}: sequence_lens must be int32 ({batch},), not {lengths.dtype} {lengths.shape}")
        if lengths.min() < 0 or lengths.max() > steps:
            raise NetworkError(f"{where}: sequence_lens must be from 0 to {steps}, the steps of X, not {lengths.tolist()}")
        # What lies past an element's length goes nowhere.
        require_values(f"{where}: X", np.where(np.arange(steps)[:, None, None] < lengths[:, None], x, np.float32(0)), float16=True)
        sizes = {"initial_h": outputs, "initial_c": hidden} if level[0].cell == "lstm" else {"initial_h": outputs}
        initial = {}
        for (what, size), name in zip(sizes.items(), names[5:]):
            shape = (len(level), batch, size)
            initial[what] = _array(values[name]) if name else np.zeros(shape, np.float32)
            if initial[what].dtype != np.float32 or initial[what].shape != shape:
                raise NetworkError(f"{where}: {what} must be float32 {shape}, not {initial[what].dtype} {initial[what].shape}")
            require_values(f"{where}: {what}", initial[what], float16=what == "initial_h")
        places = [(direction, element) for direction in range(len(level)) for element in range(batch) if lengths[element]]
        tasks = []
        for direction, element in places:
            valid = x[: lengths[element], element]
            states = [state[direction, element] for state in initial.values()]
            turned = valid[::-1] if level[direction].reverse else valid
            tasks.append(Task(level[direction], turned, *states, element=element if batch > 1 else None))
        y = np.zeros((steps, len(level), batch, outputs), np.float32)
        last = [np.zeros_like(state) for state in initial.values()]
        for place, task, result in zip(places, tasks, recurrent(tasks) if tasks else (), strict=True):
            y[: len(task.x), *place] = result.y[::-1] if task.layer.reverse else result.y
            for state, value in zip(last, (result.hidden, result.cell)):
                state[place] = value
        return y, *last


def _array(value: "np.ndarray | TensorProto") -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
