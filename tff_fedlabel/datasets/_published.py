"""What every reader of published data hands to `sources`: splits that are read batch by batch."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Published:
    """A data set as published, not yet read.

    Attributes:
      sizes: number of images by split; keys are "train", "test" and perhaps "validation".
      image_shape: (height, width, channels).
      label_names: one name per class.
      read: split name -> batches of (images uint8 [b, h, w, c], labels integer [b]); raises
        `CorruptDataError` when the files do not hold what they should.
    """

    sizes: dict[str, int]
    image_shape: tuple[int, int, int]
    label_names: tuple[str, ...]
    read: Callable[[str], Batches]
