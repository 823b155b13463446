"""Recurrent layers: their shapes, and their weights with the semantics that every reader must bring them to.

Gates stand in the order i, f, g, o (LSTM), z, r, n (GRU) or alone (RNN); readers of other conventions reorder. With s a
gate's sum W x + U h + b, p a peephole and phi the layer's `activations`,

    LSTM  i = phi0(s_i + p_i c')    f = phi0(s_f + p_f c') or, coupled, 1 - i    g = phi1(s_g)    c = f c' + i g
          o = phi0(s_o + p_o c)     h = o phi2(c), and with a projection V h = V (o phi2(c))
    GRU   z = phi0(s_z)    r = phi0(s_r)    h = (1 - z) n + z h'
          n = phi1(W x + b_n + r (U h' + d_n)) where reset after the product, else phi1(W x + U (r h') + b_n)
    RNN   h = phi0(s)

where h' and c' are those of the step before. `clip` limits every argument of phi0 and phi1 to +-clip, after peepholes.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .arithmetic import Activation
from .errors import NetworkError

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
CELLS = tuple(GATES)
# Activations of a cell where nothing else is said, in the order phi0, phi1, phi2 of the module's formulas.
STANDARD_ACTIVATIONS = {
    "lstm": (Activation.SIGMOID, Activation.TANH, Activation.TANH),
    "gru": (Activation.SIGMOID, Activation.TANH),
    "rnn": (Activation.TANH,),
}
# A coupled gate is 1 - phi(s) = phi(-s): functions for which that holds.
COUPLING_ACTIVATIONS = (Activation.SIGMOID, Activation.HARD_SIGMOID_FIFTH, Activation.HARD_SIGMOID_SIXTH)
_TENSORS = (
    "input_kernel",
    "recurrent_kernel",
    "bias",
    "candidate_bias",
    "peepholes",
    "projection",
    "initial_hidden",
    "initial_cell",
)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """All of a recurrent layer in one direction but its values: `inputs` D, `hidden` H, `projected` P or None.

    reset_after : GRU: the reset gate multiplies U h; peepholes, coupled : LSTM; clip : limit of arguments, or None
    """

    name: str
    cell: str
    inputs: int
    hidden: int
    reverse: bool = False
    projected: int | None = None
    peepholes: bool = False
    coupled: bool = False
    reset_after: bool = True
    clip: float | None = None
    activations: tuple[Activation, ...] = ()

    def __post_init__(self) -> None:
        if self.cell not in CELLS:
            raise NetworkError(f"layer {self.name}: cell must be {', '.join(CELLS)}, not {self.cell!r}")
        for name in ("inputs", "hidden", "projected"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise NetworkError(f"layer {self.name}: {name} must be at least 1, not {size}")
        if not self.activations:
            object.__setattr__(self, "activations", STANDARD_ACTIVATIONS[self.cell])
        elif len(self.activations) != len(STANDARD_ACTIVATIONS[self.cell]):
            count = len(STANDARD_ACTIVATIONS[self.cell])
            raise NetworkError(f"layer {self.name}: a cell of kind {self.cell} must have {count} activations, not {len(self.activations)}")
        features = {"projected": self.projected is not None, "peepholes": self.peepholes, "coupled": self.coupled}
        for name, present in features.items():
            if present and self.cell != "lstm":
                raise NetworkError(f"layer {self.name}: {name} must be absent for a cell of kind {self.cell} (an LSTM may have it)")
        if self.coupled and self.activations[0] not in COUPLING_ACTIVATIONS:
            allowed = " or ".join(each.name for each in COUPLING_ACTIVATIONS)
            raise NetworkError(f"layer {self.name}: coupled gates must be activated by {allowed}, not {self.activations[0].name}")
        if self.clip is not None and Activation.IDENTITY in self.activations[:2]:
            raise NetworkError(f"layer {self.name}: clip must be absent where a gate is activated by IDENTITY, not {self.clip}")
        if self.clip is not None and not 0 < self.clip < np.inf:
            raise NetworkError(f"layer {self.name}: clip must be above 0 and finite, not {self.clip}")

    @property
    def outputs(self) -> int:
        """Elements of h: P with a projection, else H."""
        return self.hidden if self.projected is None else self.projected

    @property
    def weights(self) -> int:
        """Entries of all matrices, which are also the multiplications of one step: gates x H x (D + P) + P x H."""
        return GATES[self.cell] * self.hidden * (self.inputs + self.outputs) + (self.projected or 0) * self.hidden


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One recurrent layer in one direction, with G gates in the order of the module's docstring.

    input_kernel : float32[G H, D] (W), recurrent_kernel : float32[G H, P] (U)
    bias : float32[G H], None for zeros: input and recurrent bias added up, but for d_n of a GRU that resets after the product
    candidate_bias : float32[H], None for zeros: that d_n
    peepholes : float32[3, H], p_i, p_f and p_o; projection : float32[P, H] (V)
    initial_hidden : float32[P], initial_cell : float32[H], None for zeros

    Arrays are read-only views. `NetworkError` for a wrong type or shape, a value that is not finite, and a value of a
    matrix or of the hidden state that float16 rounds to infinity.
    """

    name: str
    cell: str
    input_kernel: np.ndarray
    recurrent_kernel: np.ndarray
    bias: np.ndarray | None = None
    candidate_bias: np.ndarray | None = None
    peepholes: np.ndarray | None = None
    projection: np.ndarray | None = None
    reverse: bool = False
    coupled: bool = False
    reset_after: bool = True
    clip: float | None = None
    activations: tuple[Activation, ...] = ()
    initial_hidden: np.ndarray | None = None
    initial_cell: np.ndarray | None = None

    def __post_init__(self) -> None:
        for tensor in ("input_kernel", "recurrent_kernel", "projection"):
            shape = np.shape(getattr(self, tensor))
            if getattr(self, tensor) is None and tensor == "projection":
                continue
            if len(shape) != 2 or 0 in shape:
                raise NetworkError(f"layer {self.name}: {tensor} must be a matrix with rows and columns, not of shape {shape}")
        gates = GATES.get(self.cell, 1)
        hidden, outputs = self.hidden, self.shape.outputs
        shapes = {
            "input_kernel": (gates * hidden, self.inputs),
            "recurrent_kernel": (gates * hidden, outputs),
            "bias": (gates * hidden,),
            "candidate_bias": (hidden,),
            "peepholes": (3, hidden),
            "projection": (outputs, hidden),
            "initial_hidden": (outputs,),
            "initial_cell": (hidden,),
        }
        for tensor, shape in shapes.items():
            array = getattr(self, tensor)
            if array is not None:
                self._check(tensor, array, shape)
                view = np.ascontiguousarray(array).view()
                view.flags.writeable = False
                object.__setattr__(self, tensor, view)
        if self.candidate_bias is not None and not (self.cell == "gru" and self.reset_after):
            raise NetworkError(f"layer {self.name}: candidate_bias must be absent but for a GRU that resets after the product")
        if self.initial_cell is not None and self.cell != "lstm":
            raise NetworkError(f"layer {self.name}: initial_cell must be absent for a cell of kind {self.cell}")

    def _check(self, tensor: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
        where = f"layer {self.name}: {tensor}"
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            raise NetworkError(f"{where} must be a float32 array, not {getattr(array, 'dtype', type(array).__name__)}")
        if array.shape != shape:
            raise NetworkError(f"{where} must have the shape {shape}, not {array.shape}")
        require_values(where, array, float16=tensor not in ("bias", "candidate_bias", "peepholes", "initial_cell"))

    @property
    def inputs(self) -> int:
        return self.input_kernel.shape[1]

    @property
    def hidden(self) -> int:
        return self.recurrent_kernel.shape[0] // GATES.get(self.cell, 1)

    @property
    def outputs(self) -> int:
        return self.shape.outputs

    @cached_property
    def shape(self) -> LayerShape:
        return LayerShape(
            name=self.name,
            cell=self.cell,
            inputs=self.inputs,
            hidden=self.hidden,
            reverse=self.reverse,
            projected=None if self.projection is None else self.projection.shape[0],
            peepholes=self.peepholes is not None,
            coupled=self.coupled,
            reset_after=self.reset_after or self.cell != "gru",
            clip=self.clip,
            activations=self.activations,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shape and values; the name does not count."""
        sha = hashlib.sha256(repr(dataclasses.replace(self.shape, name="")).encode())
        for tensor in _TENSORS:
            array = getattr(self, tensor)
            sha.update(b"none" if array is None else array.astype("<f4", copy=False).data)
        return sha.hexdigest()

    def replace(self, **changes) -> "Layer":
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
