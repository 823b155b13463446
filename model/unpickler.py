"""Reads pickled data without running the pickle: plain values, and the few classes that the caller knows.

A pickle is a program for a stack machine. The one here knows the instructions that build plain values, calls nothing but
the functions that it is given for names in the pickle, and refuses every other name.
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from .errors import NetworkError

_PLAIN_KEYS = (str, bytes, int, float, bool, type(None))
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset(
    "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES"
    " SHORT_BINBYTES BINBYTES8".split()
)


def read_pickle(stream: BinaryIO, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read one pickle, up to its end, from `stream`.

    known : what stands for `module.name` in the pickle: functions, which the pickle may call, or any other value. What a
        function returns may have a method `build`, which takes the state that the pickle sets
    persistent : makes the value that a persistent id stands for

    `NetworkError` for a name that is not known; whatever a damaged pickle leads to is some other exception.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case name if name in _LITERALS:
                stack.append(argument)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "MARK":
                stack.append(_MARK)
            case "TUPLE":
                stack.append(tuple(_pop_to_mark(stack)))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "APPEND":
                _add_to(list, stack, [stack.pop()])
            case "APPENDS":
                _add_to(list, stack, _pop_to_mark(stack))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _add_to(dict, stack, [key, value])
            case "SETITEMS":
                _add_to(dict, stack, _pop_to_mark(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_find(known, argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_find(known, f"{module}.{name}"))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not any(function is each for each in known.values()):
                    raise ValueError(f"calls {type(function).__name__}")
                stack.append(function(*arguments))
            case "BUILD":
                state = stack.pop()
                # The attributes of a dictionary say nothing about its items.
                if not isinstance(stack[-1], dict):
                    stack[-1].build(state)
            case "BINPERSID" if persistent is not None:
                stack.append(persistent(stack.pop()))
            case name:
                raise ValueError(f"holds the pickle instruction {name}, which is not read")
    raise ValueError("ends before its STOP")


def _pop_to_mark(stack: list) -> list:
    # The last mark, counted from the end; `index` compares, which values on the stack need not allow.
    start = next(place for place in reversed(range(len(stack))) if stack[place] is _MARK)
    items = stack[start + 1 :]
    del stack[start:]
    return items


def _add_to(kind: type, stack: list, items: list) -> None:
    target = stack[-1]
    if type(target) is not kind:
        raise ValueError(f"adds items to {type(target).__name__}")
    if kind is list:
        target.extend(items)
        return
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, _PLAIN_KEYS):
            raise ValueError(f"has a key of kind {type(key).__name__}")
        target[key] = value


def _find(known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise NetworkError(f"holds {name}, and making it would run code; save a state dict (torch.save(model.state_dict(), ...))")
    return known[name]
