"""Reads recurrent layers out of PyTorch state dicts: nn.LSTM, nn.GRU, nn.RNN and their single cells, in all the files they come in.

Four rules. No pickle is run, and torch is not needed. A module is known by the names of its tensors (`weight_ih_l0` and so
on, behind a prefix), its cell by the rows that `weight_hh` has for each element of h: 4 of an LSTM, 3 of a GRU, 1 of an
RNN. What a state dict does not say is what PyTorch does by default: an RNN's nonlinearity is tanh unless the caller says
relu. Gates i, f, g, o stay, r, z, n leave as z, r, n; b_ih and b_hh are added up but for a GRU's n, which resets after the
product.
"""

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import safetensors

from .arithmetic import Activation
from .errors import NetworkError, one_line_errors
from .layer import GATES, Layer
from .unpickler import read_pickle

NONLINEARITIES = {"tanh": (Activation.TANH,), "relu": (Activation.RELU,)}

Level = tuple[Layer, ...]
# Tensors by their dotted names; a value is read when it is called.
_State = Mapping[str, Callable[[], np.ndarray]]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_STORAGES = {
    "Float": np.float32,
    "Double": np.float64,
    "Half": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "Long": np.int64,
    "Int": np.int32,
    "Short": np.int16,
    "Char": np.int8,
    "Byte": np.uint8,
    "Bool": np.bool_,
}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SAFETENSORS_FLOATS = ("F16", "BF16", "F32", "F64")
_NAME = re.compile(r"(?:(?P<prefix>.*)\.)?(?P<kind>weight_(?:ih|hh|hr)|bias_(?:ih|hh))(?:_l(?P<level>\d+)(?P<reverse>_reverse)?)?")
_SHOWN_NAMES = 12


def read_levels(
    path: Path, modules: Sequence[str] = (), *, tensors: Mapping[str, str] | None = None, nonlinearity: str | None = None
) -> tuple[Level, ...]:
    """Read recurrent modules of a `.pt`, `.pth`, `.safetensors`, `.npz` or `.pkl` file: a layer for each direction, forward first.

    modules : prefixes of the modules wanted, in the order in which they run; none where the file holds a single one. Keys
        of nested dictionaries are part of the prefix, as in "model_state.lstm"
    tensors : names in the file by the names that PyTorch would give, {"encoder.weight_ih_l0": "enc_w_ih"}; others are left out
    nonlinearity : of RNN cells, "tanh" or "relu"; None for tanh

    Weights of 16 or 64 bits are rounded to float32. `NetworkError` for a file that cannot be read, a class in it that is no
    tensor, a module that is missing or ambiguous, tensors that do not fit together, and values that `Layer` refuses.
    """
    path = Path(path)
    with one_line_errors(f"{path}: cannot be read"), _open_state(path) as state:
        if tensors is not None:
            _require_names(path, state, tensors.values())
            state = {name: state[stored] for name, stored in tensors.items()}
        found = _modules(state)
        if not found:
            raise NetworkError(f"{path}: holds no recurrent module (tensors like weight_ih_l0); its tensors are {_listed(state)}")
        if not modules and len(found) > 1:
            raise NetworkError(f"{path}: holds several recurrent modules; choose with {path.name}:PREFIX out of {_listed(found)}")
        for prefix in modules:
            if prefix not in found:
                raise NetworkError(f"{path}: module must be one of {_listed(found)}, not {prefix!r}")
        try:
            return tuple(level for prefix in modules or found for level in _read_module(prefix, found[prefix], nonlinearity))
        except NetworkError as error:
            raise NetworkError(f"{path}: {error}") from None


def read_tensors(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Read tensors by their names in the file, as they are stored; `NetworkError` for one that is missing or a wrong file."""
    path = Path(path)
    with one_line_errors(f"{path}: cannot be read"), _open_state(path) as state:
        _require_names(path, state, names)
        return [state[name]() for name in names]


def _require_names(path: Path, state: _State, names: Iterable[str]) -> None:
    missing = next((name for name in names if name not in state), None)
    if missing is not None:
        raise NetworkError(f"{path}: must hold the tensor {missing!r}, not only {_listed(state)}")


def _listed(names) -> str:
    names = list(names)
    shown = ", ".join(name or "'' (no prefix)" for name in names[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown or "none"


# A module's tensors by direction and kind, in each of its levels; level None is a single cell (nn.LSTMCell).
_Module = dict[int | None, dict[bool, dict[str, Callable[[], np.ndarray]]]]


def _modules(state: _State) -> dict[str, _Module]:
    found: dict[str, _Module] = {}
    for name, tensor in state.items():
        if match := _NAME.fullmatch(name):
            level = None if match["level"] is None else int(match["level"])
            directions = found.setdefault(match["prefix"] or "", {}).setdefault(level, {})
            directions.setdefault(match["reverse"] is not None, {})[match["kind"]] = tensor
    return found


def _read_module(prefix: str, module: _Module, nonlinearity: str | None) -> Iterator[Level]:
    shown = prefix or "the module"
    numbers = [None] if None in module else list(range(len(module)))
    if set(module) != set(numbers):
        raise NetworkError(f"{shown}: levels must be numbered from 0 without a gap, not {', '.join(map(str, module))}")
    before: Level | None = None
    for number in numbers:
        directions = module[number]
        wanted = {False} if number is None else set(module[0])
        if False not in wanted or set(directions) != wanted:
            raise NetworkError(f"{shown}: every level must have a forward direction, and a reverse one if l0 has it; l{number} differs")
        suffix = "" if number is None else f"_l{number}"
        place = ".".join(part for part in (prefix, suffix.removeprefix("_")) if part) or "cell"
        level = tuple(_read_layer(place, suffix, directions[reverse], reverse, nonlinearity) for reverse in sorted(directions))
        if before is not None:
            outputs = sum(layer.outputs for layer in before)
            if {layer.inputs for layer in level} != {outputs}:
                raise NetworkError(f"{place}: weight_ih{suffix} must have {outputs} columns, the outputs below, not {level[0].inputs}")
            if level[0].cell != before[0].cell:
                raise NetworkError(f"{place}: must be a cell of kind {before[0].cell} as below, not {level[0].cell}")
        yield level
        before = level


def _read_layer(place: str, suffix: str, tensors: dict[str, Callable[[], np.ndarray]], reverse: bool, nonlinearity: str | None) -> Layer:
    ending = suffix + ("_reverse" if reverse else "")
    name = f"{place}.reverse" if reverse else place
    for kind in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if {"bias_ih", "bias_hh"} & set(tensors) else ())):
        if kind not in tensors:
            raise NetworkError(f"layer {name}: {kind}{ending} must be there beside {', '.join(each + ending for each in tensors)}")
    arrays = {kind: _float32(f"layer {name}: {kind}{ending}", tensor()) for kind, tensor in tensors.items()}
    for kind in ("weight_ih", "weight_hh", "weight_hr"):
        if kind in arrays and (arrays[kind].ndim != 2 or not arrays[kind].size):
            raise NetworkError(f"layer {name}: {kind}{ending} must be a matrix with rows and columns, not of shape {arrays[kind].shape}")
    rows, outputs = arrays["weight_hh"].shape
    hidden = arrays["weight_hr"].shape[1] if "weight_hr" in arrays else outputs
    cell = next((cell for cell, gates in GATES.items() if gates * hidden == rows), None)
    if cell is None or cell != "lstm" and "weight_hr" in arrays:
        allowed = f"{4 * hidden} rows (LSTM with a projection)" if "weight_hr" in arrays else f"{_rows_of_cells(hidden)} rows"
        raise NetworkError(f"layer {name}: weight_hh{ending} must have {allowed} for {hidden} elements, not {rows}")
    if nonlinearity is not None and cell != "rnn":
        raise NetworkError(f"layer {name}: nonlinearity must be absent but for an RNN, not {nonlinearity!r} for a cell of kind {cell}")
    for kind in ("bias_ih", "bias_hh"):
        if kind in arrays and arrays[kind].shape != (rows,):
            raise NetworkError(f"layer {name}: {kind}{ending} must have the shape ({rows},), not {arrays[kind].shape}")
    bias, candidate_bias = arrays.get("bias_ih"), None
    if bias is not None:
        recurrent = arrays["bias_hh"]
        if cell == "gru":
            candidate_bias = recurrent[2 * hidden :]
            recurrent = np.concatenate((recurrent[: 2 * hidden], np.zeros(hidden, np.float32)))
        # A sum that is not finite is refused by the layer.
        with np.errstate(over="ignore", invalid="ignore"):
            bias = _ordered(cell, bias + recurrent)
    return Layer(
        name=name,
        cell=cell,
        input_kernel=_ordered(cell, arrays["weight_ih"]),
        recurrent_kernel=_ordered(cell, arrays["weight_hh"]),
        bias=bias,
        candidate_bias=candidate_bias,
        projection=arrays.get("weight_hr"),
        reverse=reverse,
        activations=NONLINEARITIES[nonlinearity or "tanh"] if cell == "rnn" else (),
    )


def _rows_of_cells(hidden: int) -> str:
    """In words: the rows of `weight_hh` by the kind of the cell."""
    kinds = [f"{gates * hidden} ({cell.upper()})" for cell, gates in GATES.items()]
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


def _ordered(cell: str, rows: np.ndarray) -> np.ndarray:
    """Reorder a GRU's blocks of rows r, z, n to z, r, n; other cells keep theirs."""
    if cell != "gru" or len(rows) % 3:
        return rows
    r, z, n = np.split(rows, 3)
    return np.concatenate((z, r, n))


def _float32(where: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.name not in _FLOATS:
        raise NetworkError(f"{where} must be of {', '.join(_FLOATS)}, not {array.dtype.name}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


@contextmanager
def _open_state(path: Path) -> Iterator[_State]:
    """Give the tensors of a file by their names; they can be read while the context lasts."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise NetworkError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        match path.suffix.lower():
            case ".safetensors":
                with safetensors.safe_open(str(path), framework="np") as tensors:
                    yield {name: _SafeTensor(tensors, name) for name in tensors.keys()}
            case ".npz":
                with np.load(file, allow_pickle=False) as arrays:
                    yield {name: lambda name=name: arrays[name] for name in arrays.files}
            case ".pkl":
                yield _flattened(_unpickled(path, file))
            case _ if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    yield _archived(path, archive)
            case _:
                file.seek(0)
                yield _legacy(path, file)


@dataclass(frozen=True)
class _SafeTensor:
    """One tensor of a safetensors file."""

    file: Any
    name: str

    def __call__(self) -> np.ndarray:
        kind = self.file.get_slice(self.name).get_dtype()
        # The library's own word for a type that numpy lacks names neither file nor tensor.
        if kind not in _SAFETENSORS_FLOATS:
            raise ValueError(f"{self.name} must be of {', '.join(_SAFETENSORS_FLOATS)}, not {kind}")
        return self.file.get_tensor(self.name)


def _flattened(value: Any) -> _State:
    """Bring nested dictionaries to tensors by dotted names; a dictionary that stands in two places counts in the first."""
    found, seen = {}, set()

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and id(value) not in seen:
            seen.add(id(value))
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, _Tensor | _Array):
            found[prefix] = value

    walk("", value)
    return found


def _unpickled(path: Path, stream: BinaryIO, persistent: Callable | None = None) -> Any:
    try:
        return read_pickle(stream, _KNOWN, persistent)
    except NetworkError as error:
        raise NetworkError(f"{path}: {error}") from None


def _archived(path: Path, archive: zipfile.ZipFile) -> _State:
    """Read the zip layout of torch.save: `data.pkl`, a record for each storage, and perhaps the order of bytes."""
    records = archive.namelist()
    main = next((name for name in records if name.endswith("/data.pkl") and name.count("/") == 1), None)
    if main is None:
        raise NetworkError(f"{path}: must be a PyTorch archive with a record data.pkl, not a zip file with {_listed(records)}")
    root = main.removesuffix("data.pkl")
    if f"{root}constants.pkl" in records:
        raise NetworkError(f"{path}: is a TorchScript archive, which is not read; save a state dict (torch.save(model.state_dict(), ...))")
    order = archive.read(f"{root}byteorder") if f"{root}byteorder" in records else b"little"
    if order != b"little":
        raise NetworkError(f"{path}: byteorder must be little, not {order[:20].decode(errors='replace')}")

    def storage(key: tuple) -> _Storage:
        kind, dtype, name, _, size = key
        if kind != "storage":
            raise ValueError(f"persistent id of kind {kind!r}")
        return _Storage(dtype, size, lambda: _record(archive, f"{root}data/{name}"))

    return _flattened(_unpickled(path, io.BytesIO(_record(archive, main)), storage))


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    # PyTorch stores records as they are; a compressed one could be of any size.
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"record {name} must be stored, not compressed")
    return archive.read(name)


def _legacy(path: Path, file: BinaryIO) -> _State:
    """Read the layout of torch.save before version 1.6: five pickles, then the storages, each after its number of elements."""
    with one_line_errors(f"{path}: must be a PyTorch file, a zip archive or one of the layout before it; damaged or another kind"):
        magic, protocol, system = (_unpickled(path, file) for _ in range(3))
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL:
        raise NetworkError(f"{path}: must start with PyTorch's magic number and protocol {_LEGACY_PROTOCOL}, not with other numbers")
    if system.get("little_endian") is not True:
        raise NetworkError(f"{path}: byteorder must be little, not big")
    storages: dict[str, _Storage] = {}
    offsets: dict[str, int] = {}

    def storage(key: tuple) -> _Storage:
        kind, dtype, name, _, size, view = key
        if kind != "storage" or view is not None:
            raise ValueError(f"persistent id of kind {kind!r} with the view {view!r}")

        def read() -> bytes:
            file.seek(offsets[name])
            return file.read(storages[name].bytes)

        return storages.setdefault(name, _Storage(dtype, size, read))

    state = _flattened(_unpickled(path, file, storage))
    for name in _unpickled(path, file):
        size = int.from_bytes(file.read(8), "little")
        if name not in storages or size != storages[name].size:
            raise ValueError(f"storage {name} has {size} elements")
        offsets[name] = file.tell()
        file.seek(storages[name].bytes, 1)
    return state


@dataclass(frozen=True)
class _Storage:
    """The flat memory that tensors are views of: `size` elements, read when a tensor is."""

    dtype: np.dtype
    size: int
    read: Callable[[], bytes]

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class _Tensor:
    """A view of a storage, as `torch._utils._rebuild_tensor_v2` describes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self) -> np.ndarray:
        sizes = (self.storage.size, self.offset, *self.shape, *self.strides)
        if not all(type(size) is int and size >= 0 for size in sizes) or len(self.shape) != len(self.strides):
            raise ValueError(f"tensor of shape {self.shape} and strides {self.strides}")
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        # Views whose elements share memory are left out: they make a small file large.
        if prod(self.shape) > self.storage.size or prod(self.shape) and last >= self.storage.size:
            raise ValueError(f"tensor of shape {self.shape} does not lie in its storage of {self.storage.size} elements")
        content = self.storage.read()
        if len(content) != self.storage.bytes:
            raise ValueError(f"storage of {self.storage.bytes} bytes has {len(content)}")
        if not prod(self.shape):
            return np.zeros(self.shape, self.storage.dtype)
        flat = np.frombuffer(content, self.storage.dtype)
        strides = [stride * flat.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides, writeable=False)


class _Array:
    """A pickled numpy array: made empty, then built from its shape, type, order and bytes."""

    def build(self, state: tuple) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def __call__(self) -> np.ndarray:
        flat = np.frombuffer(self.content, self.dtype.order + self.dtype.code)
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


class _Dtype:
    """A pickled numpy type: its letter and size, then its order of bytes."""

    def __init__(self, code: str, *_: Any) -> None:
        if re.fullmatch(r"[fiub][1248]", code) is None:
            raise ValueError(f"array of type {code!r}")
        self.code, self.order = code, "="

    def build(self, state: tuple) -> None:
        self.order = {"<": "<", ">": ">", "|": "|", "=": "="}[state[1]]


# What a pickle of tensors may name, each by a stand-in that cannot do more than hold them.
_RECONSTRUCT = {f"numpy.{core}.multiarray._reconstruct": lambda *_: _Array() for core in ("core", "_core")}
_KNOWN = {
    "collections.OrderedDict": lambda: {},
    "torch._utils._rebuild_tensor_v2": lambda storage, offset, shape, strides, *_: _Tensor(storage, offset, shape, strides),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    **{f"torch.{name}Storage": np.dtype(kind).newbyteorder("<") for name, kind in _STORAGES.items()},
    **_RECONSTRUCT,
    "numpy.ndarray": None,
    "numpy.dtype": _Dtype,
    "_codecs.encode": lambda text, _: text.encode("latin-1"),
}
