"""All contracts by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kpipe.codegen.ops import indexer, projection, query, sparse_core, value
from kpipe.codegen.ops.contract import Contract

_FAMILIES = (projection, query, indexer, sparse_core, value)

CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {contract.name: contract for family in _FAMILIES for contract in family.CONTRACTS}
)
