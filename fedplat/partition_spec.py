"""What a job file can say about partitioning: one small model per kind, told apart by `kind`.

The arithmetic is in `fedplat.partition`; this file stays free of NumPy so that the command line starts fast.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt


class PartitionSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Iid(PartitionSpec):
    """Shuffle and deal out evenly."""

    kind: Literal["iid"]


class Dirichlet(PartitionSpec):
    """Label skew: each label is spread over the clients by a draw from Dirichlet(alpha) (Hsu et al. 2019)."""

    kind: Literal["dirichlet"]
    alpha: StrictFloat = Field(0.5, gt=0)
    """Small: each client sees few labels. Large: close to IID."""
    min_examples: StrictInt = Field(2, ge=1)
    """Every client gets at least this many, taken from the largest clients."""


class Shards(PartitionSpec):
    """McMahan et al. 2017: sort by label, cut into equal shards, give each client a few."""

    kind: Literal["shards"]
    per_client: StrictInt = Field(2, ge=1)
    """Shards per client."""


class Quantity(PartitionSpec):
    """Quantity skew: client sizes follow Dirichlet(alpha), labels stay IID."""

    kind: Literal["quantity"]
    alpha: StrictFloat = Field(1.0, gt=0)
    """Small: few clients hold most examples."""
    min_examples: StrictInt = Field(1, ge=1)
    """Every client gets at least this many."""


class HashKey(PartitionSpec):
    """All examples with the same key (patient, user) go to the client chosen by a hash of that key."""

    kind: Literal["hash"]
    salt: str = ""
    """Changes which key goes where."""


class Range(PartitionSpec):
    """Consecutive blocks in the order of the data: what a site had on disk stays together."""

    kind: Literal["range"]


class Explicit(PartitionSpec):
    """You say which example goes to which client."""

    kind: Literal["explicit"]
    indices: tuple[tuple[StrictInt, ...], ...] | None = None
    """One list of example numbers per client."""
    file: str | None = None
    """Or a JSON file with that list of lists."""


class Capacity(PartitionSpec):
    """Sizes proportional to declared capacities, labels IID."""

    kind: Literal["capacity"]
    capacities: tuple[Annotated[float, Field(gt=0, strict=True)], ...] = Field(min_length=1)
    """One number per client, or a shorter list that is repeated over the clients."""


Partition = Annotated[
    Iid | Dirichlet | Shards | Quantity | HashKey | Range | Explicit | Capacity, Field(discriminator="kind")
]
KINDS: dict[str, type[PartitionSpec]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity": Quantity,
    "hash": HashKey,
    "range": Range,
    "explicit": Explicit,
    "capacity": Capacity,
}
