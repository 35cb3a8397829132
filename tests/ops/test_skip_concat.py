"""Skip concatenation's reference: channels in order, the layout of x."""

import torch

from clearway.ops.skip_concat import inputs, skip_concat


def test_channels_follow_each_other() -> None:
    for last in (False, True):
        x, skip = inputs(2, 3, 2, 4, 5, last=last)
        out = skip_concat(x, skip)
        for channel in range(5):
            source = x[:, channel] if channel < 3 else skip[:, channel - 3]
            assert torch.equal(out[:, channel], source)


def test_the_layout_is_that_of_x() -> None:
    x, skip = inputs(1, 3, 2, 4, 5)
    assert skip_concat(x, skip.contiguous()).is_contiguous(memory_format=torch.channels_last)
    assert skip_concat(x.contiguous(), skip).is_contiguous()
