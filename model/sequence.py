"""The unit of recurrent work between host and machine: one layer over the valid steps of one sequence, and what it gives.

Steps stand in the order in which the machine walks them: whoever makes a task of a reverse layer turns its inputs round,
and the outputs back. Tasks of one list do not depend on each other, so that a machine may interleave them; those of one
layer hold the same `Layer` object and share its weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .layer import Layer


@dataclass(frozen=True, eq=False)
class Task:
    """One layer over one sequence of at least one step.

    x : float32[T, D]; hidden : float32[P], h before the first step; cell : float32[H], c before it, None but for an LSTM
    element : the sequence's place in its batch, None where it is alone
    """

    layer: Layer
    x: np.ndarray
    hidden: np.ndarray
    cell: np.ndarray | None = None
    element: int | None = None

    @classmethod
    def of(cls, layer: Layer, x: np.ndarray) -> "Task":
        """Return the task of a layer over `x` from its own initial states on, zeros where it has none."""
        hidden = np.zeros(layer.outputs, np.float32) if layer.initial_hidden is None else layer.initial_hidden
        cell = np.zeros(layer.hidden, np.float32) if layer.initial_cell is None else layer.initial_cell
        return cls(layer, x, hidden, cell if layer.cell == "lstm" else None)

    @property
    def name(self) -> str:
        """The layer's name, with the element in a batch: `cell`, `cell[2]`."""
        return self.layer.name if self.element is None else f"{self.layer.name}[{self.element}]"


@dataclass(frozen=True, eq=False)
class Result:
    """What a task gives.

    y : float32[T, P], h after each step; hidden : float32[P], h after the last; cell : float32[H], c after it, None but for an LSTM
    """

    y: np.ndarray
    hidden: np.ndarray
    cell: np.ndarray | None = None


Recurrent = Callable[[Sequence[Task]], Sequence[Result]]
"""Runs tasks; results stand in their order."""
