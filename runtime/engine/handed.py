"""What an engine hands over, read by attribute, and how it is refused.

Only attributes, shapes, dtypes, strides and devices are looked at: all of that is known to the
host, so that nothing here waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.metadata import DTYPES, LayerError

INTEGERS = (torch.int32, torch.int64)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Handed:
    """A tensor of the engine and the attribute that it was read from."""

    attribute: str
    tensor: Tensor


@dataclass(frozen=True)
class Source:
    """Reads one engine's object for one layer; every refusal names layer, engine and attribute."""

    engine: str  # for example "vLLM"
    layer: str
    given: Any

    def refusal(self, attribute: str, seen: object, repair: str) -> LayerError:
        """The error for an attribute whose value does not fit; the caller raises it."""
        return LayerError(f"{self.layer} from {self.engine}: {attribute} is {seen}; {repair}")

    def optional(self, attribute: str) -> Any:
        """The value of a dotted attribute; None where any part of it is missing or None."""
        value = self.given
        for part in attribute.split("."):
            value = getattr(value, part, None)
        return value

    def count(self, attribute: str, repair: str) -> int:
        """A host integer that must be there.

        Raises LayerError where it is missing or none, and for a tensor: reading it would wait.
        """
        value = self.bound(attribute)
        if value is None:
            raise self.refusal(attribute, describe(self.optional(attribute)), repair)
        return value

    def bound(self, attribute: str) -> int | None:
        """A host integer, or None where it is missing; LayerError for a tensor."""
        value = self.optional(attribute)
        if isinstance(value, Tensor):
            raise self.refusal(attribute, describe(value), "it must be a number of the host's")
        try:
            return None if value is None else index(value)
        except TypeError:
            raise self.refusal(attribute, describe(value), "it must be an integer") from None

    def tensor(self, *attributes: str, repair: str) -> Handed:
        """The first of these attributes that holds a tensor; LayerError where none does."""
        for attribute in attributes:
            value = self.optional(attribute)
            if isinstance(value, Tensor):
                return Handed(attribute, value)
        names = " or ".join(attributes)
        raise self.refusal(names, describe(self.optional(attributes[0])), repair)

    def check_tensor(self, handed: Handed, dims: int, like: Tensor) -> None:
        """Raises LayerError unless it has `dims` axes of int32 or int64, where `like` lies."""
        tensor = handed.tensor
        if tensor.dim() != dims or tensor.dtype not in INTEGERS:
            kind = "one axis" if dims == 1 else f"{dims} axes"
            raise self.refusal(handed.attribute, describe(tensor), f"needs {kind} of i32 or i64")
        if tensor.device != like.device:
            raise self.refusal(
                handed.attribute,
                f"on {tensor.device}",
                f"the hidden states are on {like.device}: hand in the engine's device copy",
            )

    def check_extent(self, handed: Handed, least: int, what: str) -> None:
        """Raises LayerError where the first axis has fewer than `least` entries."""
        if handed.tensor.shape[0] < least:
            raise self.refusal(
                handed.attribute,
                describe(handed.tensor),
                f"the step has {least} {what}: hand in metadata and hidden states of one step",
            )

    def check_counted(self, handed: Handed, counted: int, by: str) -> None:
        """Raises LayerError unless there is one entry to each request that `by` counts.

        One to each row would be read as those of other requests.
        """
        if handed.tensor.dim() and handed.tensor.shape[0] != counted:
            seen = f"{describe(handed.tensor)} with {by} {counted}"
            repair = "hand in the tensor that has one entry to a request"
            raise self.refusal(handed.attribute, seen, repair)


def describe(value: object) -> str:
    """A value as an error shows it: shape and dtype of a tensor, never its contents."""
    if isinstance(value, Tensor):
        axes = ", ".join(str(size) for size in value.shape)
        return f"[{axes}] {_NAMES.get(value.dtype, str(value.dtype))}"
    return "missing" if value is None else repr(value)
