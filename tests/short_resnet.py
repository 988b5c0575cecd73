"""ResNet-18 without the blocks that repeat others: each kind of layer that the whole one has."""

import pytest

from tff_fedlabel import models
from tff_fedlabel.models import resnet

STAGES = ((1, 1), False)


def build_short_resnet(*arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet._ARCHITECTURES, 18, STAGES)
        return models.build_resnet(18, *arguments, **options)
