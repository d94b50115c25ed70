"""The adaptive clip norm: wherever noise drives it, the next client takes what the last one sent."""

import numpy as np
import pytest

from fedplat.privacy_section import AdaptiveClip
from privacy.clip_norm import RANGE, next_clip_norm, require_clip_norm


@pytest.mark.parametrize("share", [0.0, 1.0, -50.0, 50.0])
def test_a_clip_norm_at_the_end_of_its_range_is_still_taken(share):
    settings = AdaptiveClip(lr=10.0)
    clip_norm = 1.0
    for _ in range(40):
        clip_norm = next_clip_norm(clip_norm, share, settings)
        sent = np.array(clip_norm, np.float32)  # as it travels
        mean = np.clip(np.array(float(sent), np.float32), *RANGE)  # as the server takes the mean
        clip_norm = require_clip_norm(float(mean))
    assert clip_norm in RANGE


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), RANGE[0] / 2, RANGE[1] * 2])
def test_what_is_no_clip_norm_is_refused(wrong):
    with pytest.raises(ValueError, match="outside of"):
        require_clip_norm(wrong)
