"""Weak and strong image augmentation whose randomness is a pure function of its arguments.

`RandAugment` is the paper's strong augmentation psi (eq:ce, and the paragraph "Effect of
Strong-Augumentation", which lists its 14 operations); `WeakAugment` is the flip and shift that
FixMatch and its relatives use. Both are called as `augment(images, seed=...)`, with a seed of two
integers as TensorFlow's stateless functions take it; `step_seed` makes one from the seed of a run,
the round and the step. Both have `check_images(shape, dtype)`, which raises `ValueError`, before
anything is traced, if they cannot work on such images.
"""

from tff_fedlabel.augmentation._operations import MAX_MAGNITUDE, OPERATIONS
from tff_fedlabel.augmentation._pixels import from_float, to_float
from tff_fedlabel.augmentation._randomness import step_seed
from tff_fedlabel.augmentation.rand_augment import RandAugment, apply_operation
from tff_fedlabel.augmentation.weak_augment import WeakAugment

__all__ = [
    "MAX_MAGNITUDE",
    "OPERATIONS",
    "RandAugment",
    "WeakAugment",
    "apply_operation",
    "from_float",
    "step_seed",
    "to_float",
]
