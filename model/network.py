"""Networks: recurrent layers in the order in which they run, by shape, and with weights when somebody asks for them.

A network is a sequence of levels, each one layer or a forward and a reverse layer side by side whose outputs are
concatenated. Shapes cost nothing: weights are built or read at the first use of `Network.layers`.
"""

import dataclasses
import hashlib
import re
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
from .layer import CELLS, GATES, Layer, LayerShape

# Suffixes of the formats, each with a reader of its own.
_ONNX = (".onnx",)
_PYTORCH = (".pt", ".pth", ".safetensors", ".npz", ".pkl")
_KERAS = (".keras", ".h5", ".hdf5")


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Recurrent layers in the order in which they run.

    levels : one or two shapes each; a pair is a forward and a reverse layer over the same input
    steps : length of the sequence, None where it comes with the inputs
    build : makes the layer of a shape; called once for each shape, when weights are asked for
    model_file : the ONNX file whose other nodes the host runs, None where there is nothing but the layers
    chained : each level takes the outputs of the one before; false for the modules of a package that stand side by side
    """

    name: str
    source: str
    levels: tuple[tuple[LayerShape, ...], ...]
    steps: int | None
    build: Callable[[LayerShape], Layer]
    model_file: Path | None = None
    chained: bool = True

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
    def layers(self) -> tuple[Layer, ...]:
        """The layers with their weights, in the order of `shapes`."""
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
    cell: Literal[CELLS]
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
    """A trained network that an installed Python package ships, in any file that `load_network` reads.

    modules, tensors, nonlinearity : of a PyTorch state dict, as `pytorch_reader.read_levels` takes them
    """

    name: Name
    source: str
    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    file: str
    modules: list[str] = []
    tensors: dict[str, str] | None = None
    nonlinearity: Literal["tanh", "relu"] | None = None
    install: str

    def path(self) -> Path:
        """Find the file; `NetworkError` says how to get it."""
        try:
            return installed_file(self.package, self.file, self.install)
        except NetworkError as error:
            raise NetworkError(f"network {self.name}: {error}") from None

    def network(self) -> Network:
        options = {"modules": self.modules, "tensors": self.tensors, "nonlinearity": self.nonlinearity}
        return _read_model(self.path(), self.name, self.source, **{name: value for name, value in options.items() if value})


def installed_file(package: str, file: str, install: str) -> Path:
    """Find a file of a Python package without importing it, which may be heavy or fail; `NetworkError` says how to get it."""
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / file
        if path.is_file():
            return path
    raise NetworkError(f"needs {file} of the Python package {package}; get it with `{install}`")


def _random_layer(seeds: dict[LayerShape, tuple[int, int]], shape: LayerShape) -> Layer:
    generator = np.random.Generator(np.random.PCG64(seeds[shape]))
    bound = np.float32(1 / np.sqrt(shape.hidden))

    def uniform(*size: int) -> np.ndarray:
        return (2 * generator.random(size, dtype=np.float32) - 1) * bound

    rows = GATES[shape.cell] * shape.hidden
    return Layer(
        name=shape.name,
        cell=shape.cell,
        input_kernel=uniform(rows, shape.inputs),
        recurrent_kernel=uniform(rows, shape.hidden),
        bias=uniform(rows),
        candidate_bias=uniform(shape.hidden) if shape.cell == "gru" else None,
        reverse=shape.reverse,
    )


def network_names() -> list[str]:
    """Names of the ready-made networks."""
    return sorted(path.stem for path in (ROOT / "networks").glob("*.yaml"))


def packaged_file(name: str) -> Path:
    """Find the file that the ready-made network `name` is read from; `NetworkError` where it is not installed."""
    path = ROOT / "networks" / f"{name}.yaml"
    return validate(PackageFile, read_yaml(path), str(path)).path()


def load_network(name_or_path: str) -> Network:
    """Load a network by the name of a file in `configs/networks`, or from a file, by its suffix.

    ONNX `.onnx`; PyTorch `.pt`, `.pth`, `.safetensors`, `.npz` or `.pkl`, with `:PREFIX` behind it to choose one of several
    modules; Keras `.keras`, `.h5` or `.hdf5`; a description `.yaml`. The steps of a trained network come with its inputs.

    `ConfigError` for a description that is wrong, `NetworkError` for an unknown name or a model that cannot be read.
    """
    path = Path(name_or_path)
    if name_or_path in network_names():
        path = ROOT / "networks" / f"{name_or_path}.yaml"
    if path.suffix.lower() in (".yaml", ".yml"):
        data = read_yaml(path)
        schema = PackageFile if isinstance(data, dict) and "package" in data else ShapeFile
        return validate(schema, data, str(path)).network()
    file, module = name_or_path, None
    if with_module := re.fullmatch(rf"(?s)(.+(?:{'|'.join(map(re.escape, _PYTORCH))})):([^/\\]*)", name_or_path, re.IGNORECASE):
        file, module = with_module.groups()
    path = Path(file)
    if path.suffix.lower() not in (*_ONNX, *_PYTORCH, *_KERAS):
        kinds = f"a file ({', '.join((*_ONNX, *_PYTORCH, *_KERAS, '.yaml'))})"
        raise NetworkError(f"network must be {kinds} or one of {', '.join(network_names())}, not {name_or_path!r}")
    return _read_model(path, path.stem, name_or_path, **({} if module is None else {"modules": [module]}))


def _read_model(path: Path, name: str, source: str, **options) -> Network:
    # Imported here: studies of shapes do not pay for loading the libraries of the formats.
    match path.suffix.lower():
        case suffix if suffix in _ONNX:
            from .onnx_reader import read_levels
        case suffix if suffix in _PYTORCH:
            from .pytorch_reader import read_levels
        case _:
            from .keras_reader import read_levels
    if options and path.suffix.lower() not in _PYTORCH:
        raise NetworkError(f"network {name}: {', '.join(options)} must be absent but for a PyTorch state dict, not given for {path.name}")
    read = read_levels(path, **options)
    built = {layer.shape: layer for level in read for layer in level}
    levels = tuple(tuple(layer.shape for layer in level) for level in read)
    model_file = path if path.suffix.lower() in _ONNX else None
    chained = len(options.get("modules", ())) <= 1
    return Network(name=name, source=source, levels=levels, steps=None, build=built.__getitem__, model_file=model_file, chained=chained)
