"""Networks: shapes of recurrent layers, and their weights when somebody asks for them.

Three rules. Gates stand in the order i, f, g, o everywhere; readers of other conventions reorder. A network is a
sequence of levels, each one layer or a forward and a reverse layer side by side whose outputs are concatenated. Shapes
cost nothing: weights are built or read at the first use of `Network.layers`.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sharp.configs import ROOT

from .config import Schema, read_yaml, validate
from .errors import NetworkError

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
SUPPORTED_CELLS = ("lstm",)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape of one recurrent layer in one direction: `inputs` D, `hidden` H."""

    name: str
    cell: str
    inputs: int
    hidden: int
    reverse: bool = False

    @property
    def weights(self) -> int:
        """Entries of W and U, which are also the multiplications of one step: gates x H x (D + H)."""
        return GATES[self.cell] * self.hidden * (self.inputs + self.hidden)


@dataclass(frozen=True, kw_only=True, eq=False)
class LstmLayer:
    """One LSTM layer in one direction, gates in the order i, f, g, o.

    input_kernel : float32[4H, D] (W), recurrent_kernel : float32[4H, H] (U)
    bias : float32[4H], input and recurrent bias added up
    initial_hidden, initial_cell : float32[H], None for zeros

    Arrays are read-only views. `NetworkError` for a wrong type or shape, a value that is not finite, and a value of a
    kernel or of the hidden state that float16 rounds to infinity.
    """

    name: str
    input_kernel: np.ndarray
    recurrent_kernel: np.ndarray
    bias: np.ndarray
    reverse: bool = False
    initial_hidden: np.ndarray | None = None
    initial_cell: np.ndarray | None = None

    def __post_init__(self) -> None:
        for tensor in ("input_kernel", "recurrent_kernel"):
            shape = np.shape(getattr(self, tensor))
            if len(shape) != 2 or 0 in shape:
                raise NetworkError(f"layer {self.name}: {tensor} must be a matrix with rows and columns, not of shape {shape}")
        shapes = {
            "input_kernel": (4 * self.hidden, self.inputs),
            "recurrent_kernel": (4 * self.hidden, self.hidden),
            "bias": (4 * self.hidden,),
            "initial_hidden": (self.hidden,),
            "initial_cell": (self.hidden,),
        }
        for tensor, shape in shapes.items():
            array = getattr(self, tensor)
            if array is None and tensor.startswith("initial"):
                continue
            self._check(tensor, array, shape)
            view = np.ascontiguousarray(array).view()
            view.flags.writeable = False
            object.__setattr__(self, tensor, view)

    def _check(self, tensor: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
        where = f"layer {self.name}: {tensor}"
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            raise NetworkError(f"{where} must be a float32 array, not {getattr(array, 'dtype', type(array).__name__)}")
        if array.shape != shape:
            raise NetworkError(f"{where} must have the shape {shape}, not {array.shape}")
        require_values(where, array, float16=tensor not in ("bias", "initial_cell"))

    @property
    def inputs(self) -> int:
        return self.input_kernel.shape[1]

    @property
    def hidden(self) -> int:
        return self.recurrent_kernel.shape[1]

    @property
    def shape(self) -> LayerShape:
        return LayerShape(name=self.name, cell="lstm", inputs=self.inputs, hidden=self.hidden, reverse=self.reverse)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of direction, shapes and values; the name does not count."""
        sha = hashlib.sha256(f"lstm {self.inputs} {self.hidden} {self.reverse}".encode())
        for array in (self.input_kernel, self.recurrent_kernel, self.bias, self.initial_hidden, self.initial_cell):
            sha.update(b"none" if array is None else array.astype("<f4", copy=False).data)
        return sha.hexdigest()

    def replace(self, **changes) -> "LstmLayer":
        return dataclasses.replace(self, **changes)


def require_values(where: str, array: np.ndarray, *, float16: bool) -> None:
    """Raise `NetworkError` with the first value that is not finite or, with `float16`, that float16 rounds to infinity."""
    wrong, allowed = ~np.isfinite(array), "finite"
    if float16 and not wrong.any():
        with np.errstate(over="ignore"):
            wrong, allowed = np.isinf(array.astype(np.float16)), "within float16's range of +-65504"
    if wrong.any():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), array.shape))
        raise NetworkError(f"{where}{list(index)} must be {allowed}, not {array[index]}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Recurrent layers in the order in which they run.

    levels : one or two shapes each; a pair is a forward and a reverse layer over the same input
    steps : length of the sequence, None where it comes with the inputs
    build : makes the layer of a shape; called once for each shape, when weights are asked for
    model_file : the ONNX file whose other nodes the host runs, None where there is nothing but the layers
    """

    name: str
    source: str
    levels: tuple[tuple[LayerShape, ...], ...]
    steps: int | None
    build: Callable[[LayerShape], LstmLayer]
    model_file: Path | None = None

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """All layers' shapes, forward before reverse."""
        return tuple(shape for level in self.levels for shape in level)

    @property
    def macs_per_step(self) -> int:
        """Multiplications of matrices by vectors in one step of all layers."""
        return sum(shape.weights for shape in self.shapes)

    @property
    def macs(self) -> int:
        """Multiplications of the whole sequence; `NetworkError` where its length comes with the inputs."""
        if self.steps is None:
            raise NetworkError(f"network {self.name}: the number of steps comes with its inputs")
        return self.steps * self.macs_per_step

    @property
    def weights_bytes(self) -> int:
        """Bytes of W and U of all layers in float16; biases live in accumulators."""
        return 2 * self.macs_per_step

    @cached_property
    def layers(self) -> tuple[LstmLayer, ...]:
        """The layers with their weights, in the order of `shapes`; `NetworkError` for a cell that is not supported."""
        for shape in self.shapes:
            if shape.cell not in SUPPORTED_CELLS:
                allowed = " or ".join(SUPPORTED_CELLS)
                raise NetworkError(f"network {self.name}: cell must be {allowed} (supported now), not {shape.cell!r}")
        return tuple(self.build(shape) for shape in self.shapes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of steps, levels and all values; names do not count."""
        levels = [len(level) for level in self.levels]
        return hashlib.sha256(f"{self.steps} {levels} {[layer.digest for layer in self.layers]}".encode()).hexdigest()

    def replace(self, **changes) -> "Network":
        return dataclasses.replace(self, **changes)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Size = Annotated[int, Field(ge=1, le=65536)]


class RandomWeights(Schema):
    seed: Annotated[int, Field(ge=0)]


class ShapeFile(Schema):
    """A network of equal layers known by its shape alone; weights are random, uniform within +-1 / sqrt(H).

    Levels after the first take the outputs of the level before: `hidden` values, twice as many with `bidirectional`.
    """

    name: Name
    source: str
    confidence: Literal["verbatim", "recalled"]
    cell: Literal["lstm", "gru", "rnn"]
    layers: Size
    inputs: Size
    hidden: Size
    bidirectional: bool
    steps: Size
    weights: RandomWeights

    def network(self) -> Network:
        directions = (False, True) if self.bidirectional else (False,)
        levels = tuple(
            tuple(
                LayerShape(
                    name=f"{self.name}.{level}{'.reverse' if reverse else ''}",
                    cell=self.cell,
                    inputs=len(directions) * self.hidden if level else self.inputs,
                    hidden=self.hidden,
                    reverse=reverse,
                )
                for reverse in directions
            )
            for level in range(self.layers)
        )
        shapes = [shape for level in levels for shape in level]
        seeds = {shape: (self.weights.seed, index) for index, shape in enumerate(shapes)}
        source = f"{self.source} ({self.confidence})"
        return Network(name=self.name, source=source, levels=levels, steps=self.steps, build=partial(_random_layer, seeds))


class PackageFile(Schema):
    """A trained network that an installed Python package ships as an ONNX file."""

    name: Name
    source: str
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    file: str
    install: str

    def path(self) -> Path:
        """Find the file without importing the package, whose imports may be heavy or missing; `NetworkError` says how to get it."""
        spec = find_spec(self.package)
        for folder in spec.submodule_search_locations or [] if spec else []:
            path = Path(folder) / self.file
            if path.is_file():
                return path
        raise NetworkError(f"network {self.name}: needs {self.file} of the Python package {self.package}; get it with `{self.install}`")


def _random_layer(seeds: dict[LayerShape, tuple[int, int]], shape: LayerShape) -> LstmLayer:
    generator = np.random.Generator(np.random.PCG64(seeds[shape]))
    bound = np.float32(1 / np.sqrt(shape.hidden))

    def uniform(*size: int) -> np.ndarray:
        return (2 * generator.random(size, dtype=np.float32) - 1) * bound

    rows = 4 * shape.hidden
    return LstmLayer(
        name=shape.name,
        input_kernel=uniform(rows, shape.inputs),
        recurrent_kernel=uniform(rows, shape.hidden),
        bias=uniform(rows),
        reverse=shape.reverse,
    )


def network_names() -> list[str]:
    """Names of the ready-made networks."""
    return sorted(path.stem for path in (ROOT / "networks").glob("*.yaml"))


def load_network(name_or_path: str) -> Network:
    """Load a network by the name of a file in `configs/networks`, or from an ONNX (`.onnx`) or YAML (`.yaml`) file.

    `ConfigError` for a description that is wrong, `NetworkError` for an unknown name or a model that cannot be read.
    """
    path = Path(name_or_path)
    if name_or_path in network_names():
        path = ROOT / "networks" / f"{name_or_path}.yaml"
    match path.suffix.lower():
        case ".onnx":
            return _read_onnx(path, path.stem, str(path))
        case ".yaml" | ".yml":
            data = read_yaml(path)
            if isinstance(data, dict) and "package" in data:
                packaged = validate(PackageFile, data, str(path))
                return _read_onnx(packaged.path(), packaged.name, packaged.source)
            return validate(ShapeFile, data, str(path)).network()
    raise NetworkError(f"network must be an .onnx file, a .yaml file or one of {', '.join(network_names())}, not {name_or_path!r}")


def _read_onnx(path: Path, name: str, source: str) -> Network:
    # Imported here: studies of shapes do not pay for loading the ONNX libraries.
    from .onnx_reader import read_levels

    read = read_levels(path)
    built = {layer.shape: layer for level in read for layer in level}
    levels = tuple(tuple(layer.shape for layer in level) for level in read)
    return Network(name=name, source=source, levels=levels, steps=None, build=built.__getitem__, model_file=path)
