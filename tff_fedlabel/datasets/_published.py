"""What every reader of published data returns to `sources`: splits to read batch by batch."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

Batches = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Published:
    """A data set as published, not yet read.

    Attributes:
      sizes: number of images by split; keys are "train", and possibly "test" and "validation".
      image_shape: (height, width, channels).
      label_names: one name per class.
      read: split name -> batches of (images uint8 [b, h, w, c], labels integer [b]); raises
        `CorruptDataError` if the files do not contain what they should.
    """

    sizes: dict[str, int]
    image_shape: tuple[int, int, int]
    label_names: tuple[str, ...]
    read: Callable[[str], Batches]
