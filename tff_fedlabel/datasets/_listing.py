"""What one's own data consists of, apart from the pixels."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tff_fedlabel.datasets._client_columns import NO_LABEL, ClientId

PARTS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class ImageSizes:
    """The sizes that images have before they are resized.

    Attributes:
      smallest: (height, width) of the image with the fewest pixels.
      largest: that of the one with the most.
    """

    smallest: tuple[int, int]
    largest: tuple[int, int]

    def __str__(self) -> str:
        sizes = dict.fromkeys((self.smallest, self.largest))
        return "..".join(f"{height}x{width}" for height, width in sizes)


class Images(Protocol):
    """The pixels of a `Listing`, not yet read."""

    def read(
        self, image_size: int | None, folder: str | None
    ) -> tuple[np.ndarray, ImageSizes | None]:
        """uint8 [n, height, width, channels], rows as in the listing, and the sizes before.

        The sizes are None where that is no longer known: the images were read in an earlier run.

        Args:
          image_size: height and width in pixels; None leaves the images as they are.
          folder: where to keep what is read; None is the default.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Listing:
    """One's own images: their labels, clients and parts.

    The rows are in the order training, validation, test.

    Attributes:
      name: what the data is called in messages.
      y: int32 [n], -1 without a label.
      sizes: images by part; the keys are those of `PARTS` that the data has, "train" first.
      client_ids: one for each training image, or None if the data names no clients.
      label_names: names of the classes.
      images: the pixels.
    """

    name: str
    y: np.ndarray
    sizes: dict[str, int]
    client_ids: Sequence[ClientId] | None
    label_names: tuple[str, ...]
    images: Images

    def __post_init__(self):
        if not (self.train_labels != NO_LABEL).any():
            raise ValueError(f"{self.name} has no training image with a label.")
        if len(self.label_names) < 2:
            raise ValueError(
                f"{self.name} has {len(self.label_names)} class"
                f"{f' ({self.label_names[0]})' if self.label_names else 'es'}; at least 2 are "
                "needed: class folders or integers 0, 1, ... as labels."
            )

    @property
    def train_labels(self) -> np.ndarray:
        """int32, labels of the training images."""
        return self.y[: self.sizes["train"]]

    @property
    def num_unlabeled(self) -> int:
        """Training images without a label."""
        return int((self.train_labels == NO_LABEL).sum())
