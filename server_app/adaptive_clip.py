"""An adaptive clip norm on its way: it travels beside the model as `privacy/clip_norm`, past the strategy.

Strategies never see it: it is no weight, and an optimiser's step on it would mean nothing. With unit client, each reply
says there whether its norm was below (1 or 0), and `server_app/private_mean.py` releases the next one; with unit sample
each client adapts its own, and `server_app/collect.py` takes the mean. The mathematics is in `privacy/clip_norm.py`.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from fedplat import wire
from fedplat.model import Arrays


def without_clip_norm(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """What a strategy may see."""
    return {name: array for name, array in arrays.items() if name != wire.CLIP_NORM}


def send_clip_norm(requests: Iterable[Message], arrays: Mapping[str, np.ndarray]) -> None:
    """Put the clip norm (if the job has one) beside the model in a strategy's requests."""
    if wire.CLIP_NORM not in arrays:
        return
    clip_norm = Array(np.asarray(arrays[wire.CLIP_NORM]))
    contents = {id(request.content): request.content for request in requests}  # one content for all, as a rule
    for content in contents.values():
        # A new record: the strategy may keep the one that it sent.
        model = wire.records(content, ArrayRecord)[wire.ARRAYS]
        content[wire.ARRAYS] = ArrayRecord({**dict(model.items()), wire.CLIP_NORM: clip_norm})
