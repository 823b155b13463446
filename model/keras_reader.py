"""Reads recurrent layers out of Keras models: `.keras` archives of Keras 2.12 and later, and `.h5` files since Keras 2.0.

Four rules. LSTM, GRU, SimpleRNN and Bidirectional become levels in the model's order, those of nested models too; all other
layers are left out, so what stands between two levels is up to the caller. Gates i, f, c, o and z, r, h keep their order.
`hard_sigmoid` is x / 5 + 1/2 in Keras 2 and x / 6 + 1/2 in Keras 3, so the version that wrote the file counts. A layer
stands for what it does to one sequence at inference, from states that the caller gives: dropout and `stateful` change
nothing, while masks, other merge modes and other recurrent layers are refused by name.
"""

import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from .arithmetic import Activation
from .errors import NetworkError, one_line_errors
from .layer import GATES, Layer

Level = tuple[Layer, ...]

_CELLS = {"LSTM": "lstm", "GRU": "gru", "SimpleRNN": "rnn"}
_MODELS = ("Sequential", "Functional", "Model")
_SUPPORTED = ", ".join((*_CELLS, "Bidirectional"))
# Groups of weights in an archive bear the class of their layer, and a number from the second of a class on.
_GROUPS = {**{name: name.lower() for name in (*_CELLS, *_MODELS, "Bidirectional")}, "SimpleRNN": "simple_rnn"}
# The group of all layers, and its name in Keras 2.12 and 2.13.
_CONTAINERS = ("layers", "_layer_checkpoint_dependencies")
_ACTIVATIONS = {
    "sigmoid": Activation.SIGMOID,
    "tanh": Activation.TANH,
    "relu": Activation.RELU,
    "linear": Activation.IDENTITY,
    None: Activation.IDENTITY,
}
_HARD_SIGMOIDS = {2: Activation.HARD_SIGMOID_FIFTH, 3: Activation.HARD_SIGMOID_SIXTH}
_FLOATS = ("float16", "float32", "float64")
_WEIGHTS = ("kernel", "recurrent_kernel", "bias")


def read_levels(path: Path) -> tuple[Level, ...]:
    """Read all recurrent layers of a `.keras`, `.h5` or `.hdf5` file: a level for each, of two layers where it is bidirectional.

    `NetworkError` for a file that cannot be read, one without a recurrent layer, and what is not supported.
    """
    path = Path(path)
    with one_line_errors(f"{path}: cannot be read"), _open_model(path) as model:
        try:
            levels = tuple(model.levels())
        except NetworkError as error:
            raise NetworkError(f"{path}: {error}") from None
        if not levels:
            classes = sorted({each.kind for each in model.entries()})
            raise NetworkError(f"{path}: holds no recurrent layer ({_SUPPORTED}); its layers are {', '.join(classes) or 'none'}")
    return levels


@dataclass(frozen=True)
class _Entry:
    """One layer of a model that is no model itself: class, configuration, and where an archive has its weights.

    nested : inside another model, whose weights an `.h5` file does not tell apart
    """

    name: str
    kind: str
    config: dict
    group: str
    nested: bool
    foreign: bool


@dataclass(frozen=True)
class _Model:
    """An open model: its configuration, the major version of the Keras that wrote it, its weights."""

    config: dict
    version: int
    weights: h5py.Group
    archived: bool

    def entries(self) -> Iterator[_Entry]:
        yield from _entries(self.config, "", "")

    def levels(self) -> Iterator[Level]:
        for entry in self.entries():
            try:
                _require_no_mask(entry)
                if entry.kind in (*_CELLS, "Bidirectional") and not entry.foreign:
                    yield self._level(entry)
                elif _is_recurrent(entry.kind, entry.config):
                    raise NetworkError(f"class must be {_SUPPORTED}, not {entry.kind}{' of another package' if entry.foreign else ''}")
            except NetworkError as error:
                raise NetworkError(f"layer {entry.name}: {error}") from None

    def _level(self, entry: _Entry) -> Level:
        config = entry.config
        if entry.kind != "Bidirectional":
            if config.get("go_backwards") and config.get("return_sequences"):
                raise NetworkError("go_backwards must be false where return_sequences is true: the outputs would leave in reverse order")
            (arrays,) = self._arrays(entry, ("",))
            return (self._layer(entry.name, entry.kind, config, arrays, bool(config.get("go_backwards"))),)
        if config.get("merge_mode", "concat") != "concat":
            raise NetworkError(f"merge_mode must be concat, not {config['merge_mode']}")
        forward = config["layer"]
        backward = config.get("backward_layer") or {**forward, "config": {**forward["config"], "go_backwards": True}}
        for side, goes_backwards in ((forward, False), (backward, True)):
            if side["class_name"] not in _CELLS or side.get("registered_name"):
                raise NetworkError(f"class inside Bidirectional must be {', '.join(_CELLS)}, not {side['class_name']}")
            if bool(side["config"].get("go_backwards")) != goes_backwards:
                raise NetworkError(f"go_backwards must be {goes_backwards} in the {'backward' if goes_backwards else 'forward'} layer")
        arrays = self._arrays(entry, ("forward_layer", "backward_layer"))
        return (
            self._layer(entry.name, forward["class_name"], forward["config"], arrays[0], False),
            self._layer(f"{entry.name}.reverse", backward["class_name"], backward["config"], arrays[1], True),
        )

    def _arrays(self, entry: _Entry, sides: tuple[str, ...]) -> list[list[h5py.Dataset]]:
        """Find the weights of each side of a layer in the order kernel, recurrent_kernel, bias."""
        if not self.archived:
            return self._named_arrays(entry, len(sides))
        container = next((name for name in _CONTAINERS if name in self.weights), _CONTAINERS[0])
        group = self.weights.get(entry.group.replace(_CONTAINERS[0], container))
        if group is None:
            raise NetworkError(f"weights must be there in the group {entry.group}")
        # Older versions leave the name out.
        if group["vars"].attrs.get("name", entry.name.rpartition(".")[2]) != entry.name.rpartition(".")[2]:
            raise NetworkError(f"group {entry.group} must hold its weights, not those of {group['vars'].attrs['name']}")
        found = [group[f"{side}/cell/vars" if side else "cell/vars"] for side in sides]
        return [[values[str(number)] for number in range(len(values))] for values in found]

    def _named_arrays(self, entry: _Entry, sides: int) -> list[list[h5py.Dataset]]:
        if entry.nested:
            raise NetworkError("model around it must be the whole model in an .h5 file, not a nested one; save it as .keras")
        group = self.weights[entry.name]
        names = [_text(name) for name in group.attrs["weight_names"]]
        size = len(names) // sides
        parts = [names[size * side : size * (side + 1)] for side in range(sides)]
        for part in parts:
            ends = [name.rpartition("/")[2].partition(":")[0] for name in part]
            if ends != list(_WEIGHTS[: len(ends)]) or len(part) * sides != len(names):
                raise NetworkError(f"weights must be {', '.join(_WEIGHTS)} for each direction, not {', '.join(names)}")
        return [[group[name] for name in part] for part in parts]

    def _layer(self, name: str, kind: str, config: dict, arrays: list[h5py.Dataset], reverse: bool) -> Layer:
        cell, units = _CELLS[kind], config["units"]
        if type(units) is not int or units < 1:
            raise NetworkError(f"units must be a number from 1, not {units!r}")
        rows = GATES[cell] * units
        use_bias, reset_after = config.get("use_bias", True), cell == "gru" and bool(config.get("reset_after", False))
        if len(arrays) != 2 + bool(use_bias):
            raise NetworkError(f"weights must be {2 + bool(use_bias)} arrays with use_bias {use_bias}, not {len(arrays)}")
        inputs = arrays[0].shape[0] if arrays[0].ndim == 2 else 1
        shapes = ((inputs, rows), (units, rows), (2, rows) if reset_after else (rows,))
        kernel, recurrent_kernel, *biases = (_float32(*each) for each in zip(_WEIGHTS, arrays, shapes))
        bias, candidate_bias = biases[0] if biases else None, None
        if bias is not None and reset_after:
            candidate_bias = bias[1, 2 * units :]
            # A sum that is not finite is refused by the layer.
            with np.errstate(over="ignore", invalid="ignore"):
                bias = np.concatenate((bias[0, : 2 * units] + bias[1, : 2 * units], bias[0, 2 * units :]))
        gate = () if cell == "rnn" else (self._activation(config, "recurrent_activation"),)
        output = self._activation(config, "activation")
        return Layer(
            name=name,
            cell=cell,
            input_kernel=np.ascontiguousarray(kernel.T),
            recurrent_kernel=np.ascontiguousarray(recurrent_kernel.T),
            bias=bias,
            candidate_bias=candidate_bias,
            reverse=reverse,
            reset_after=reset_after,
            activations=(*gate, output, output) if cell == "lstm" else (*gate, output),
        )

    def _activation(self, config: dict, field: str) -> Activation:
        name = config[field]
        if isinstance(name, dict):
            name = str(name.get("config"))
        if name == "hard_sigmoid":
            return _HARD_SIGMOIDS[self.version]
        if name not in _ACTIVATIONS:
            known = [each for each in _ACTIVATIONS if each]
            raise NetworkError(f"{field} must be {', '.join(known)} or hard_sigmoid, not {name}")
        return _ACTIVATIONS[name]


def _entries(model: dict, name: str, group: str) -> Iterator[_Entry]:
    """Yield the layers of a model's configuration, nested models unfolded."""
    # Sequential models of Keras before 2.2.3 are their list of layers.
    layers = model["config"]["layers"] if isinstance(model["config"], dict) else model["config"]
    counts: Counter[str] = Counter()
    for each in layers:
        kind = each["class_name"]
        own = _GROUPS.get(kind, kind)
        number, counts[own] = counts[own], counts[own] + 1
        inner_group = f"{group}{_CONTAINERS[0]}/{own}{f'_{number}' if number else ''}"
        inner_name = each["config"].get("name") if isinstance(each["config"], dict) else each.get("name")
        inner_name = f"{name}{inner_name or each.get('name') or own}"
        if kind in _MODELS:
            yield from _entries(each, f"{inner_name}.", f"{inner_group}/")
        else:
            yield _Entry(inner_name, kind, each["config"], inner_group, bool(name), bool(each.get("registered_name")))


def _require_no_mask(entry: _Entry) -> None:
    if entry.kind == "Masking":
        raise NetworkError("class must not be Masking: sequences are given in their own length")
    if entry.config.get("mask_zero"):
        raise NetworkError("mask_zero must be false: sequences are given in their own length")


def _is_recurrent(kind: str, config: dict) -> bool:
    """Whether a layer that is not supported is recurrent, or a wrapper of one."""
    inner = config.get("layer")
    if isinstance(inner, dict):
        return inner["class_name"] in (*_CELLS, "Bidirectional") or _is_recurrent(inner["class_name"], inner["config"])
    return kind in (*_CELLS, "Bidirectional") or "recurrent_initializer" in config or "cell" in config


def _float32(name: str, stored: h5py.Dataset, shape: tuple[int, ...]) -> np.ndarray:
    if stored.shape != shape:
        raise NetworkError(f"{name} must have the shape {shape}, not {stored.shape}")
    if stored.dtype.name not in _FLOATS:
        raise NetworkError(f"{name} must be of {', '.join(_FLOATS)}, not {stored.dtype.name}")
    # HDF5 makes up what a file leaves out, of any size.
    if stored.id.get_storage_size() < stored.nbytes:
        raise NetworkError(f"{name} must be stored in full, not as {stored.id.get_storage_size()} bytes of {stored.nbytes}")
    with np.errstate(over="ignore"):
        return stored[()].astype(np.float32)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def _open_model(path: Path) -> Iterator[_Model]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NetworkError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix.lower() == ".keras":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = ("config.json", "metadata.json", "model.weights.h5")
            if not {*members} <= {*archive.namelist()}:
                given = ", ".join(archive.namelist()[:12])
                raise NetworkError(f"{path}: must be a Keras archive with {', '.join(members)}, not a zip file with {given}")
            config, metadata = (json.loads(archive.read(name)) for name in members[:2])
            content = archive.read(members[2])
        with h5py.File(io.BytesIO(content), "r") as weights:
            yield _Model(config, _major_version(path, metadata["keras_version"]), weights, True)
        return
    with h5py.File(io.BytesIO(content), "r") as file:
        if "model_config" not in file.attrs or "model_weights" not in file:
            raise NetworkError(f"{path}: must be a whole model with model_config and model_weights, not weights alone; use model.save()")
        version = _major_version(path, _text(file.attrs.get("keras_version", "1")))
        yield _Model(json.loads(_text(file.attrs["model_config"])), version, file["model_weights"], False)


def _major_version(path: Path, version: str) -> int:
    major = int(version.partition(".")[0])
    if major not in _HARD_SIGMOIDS:
        raise NetworkError(f"{path}: keras_version must be 2 or 3, not {version}")
    return major
