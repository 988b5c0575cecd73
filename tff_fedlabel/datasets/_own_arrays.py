"""Images of one's own as arrays: in an `.npz` file, or in a mapping with the same names.

x (or x_train)              uint8 [n, h, w, c] or [n, h, w], c 1 or 3
y (or y_train)              [n] integers or names of classes; NaN, -1 or "": no label
client_ids                  optional, [n] strings or integers
labeled                     optional, bool [n]; where False, y is not looked at
x_test, y_test              optional, images that all have a label
x_validation, y_validation  optional, likewise
"""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any

import numpy as np
import PIL.Image

from tff_fedlabel._validation import nearest
from tff_fedlabel.datasets import _client_columns, _image_files
from tff_fedlabel.datasets._client_columns import NO_LABEL
from tff_fedlabel.datasets._client_data_checks import MOST_CLASSES
from tff_fedlabel.datasets._image_cache import ImageCache
from tff_fedlabel.datasets._listing import PARTS, ImageSizes, Listing
from tff_fedlabel.datasets._source_errors import CorruptDataError

_ALSO_CALLED = {"x_train": "x", "y_train": "y"}
_FIELDS = {"train": ("x", "y"), **{p: (f"x_{p}", f"y_{p}") for p in PARTS[1:]}}
NAMES = (*(name for fields in _FIELDS.values() for name in fields), "client_ids", "labeled")
_READ_BYTES = 1 << 24
# zipfile raises RuntimeError for what is encrypted or packed in a way that it does not know.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


def list_npz(path: pathlib.Path, name: str) -> Listing:
    """Reads labels and clients of a file; the images stay where they are.

    Raises:
      ValueError: arrays are missing, unknown, or do not fit together.
      CorruptDataError: the file is damaged or is no `.npz` file.
    """
    return _listing(_NpzArrays(path, name), name)


def list_arrays(arrays: Mapping[str, Any], name: str) -> Listing:
    """The same for arrays in memory, which are kept and not copied."""
    if not isinstance(arrays, Mapping):
        raise ValueError(
            f"the source of {name} must return a mapping with the arrays {', '.join(NAMES)} or a "
            f"datasets.sources.Source, got {type(arrays).__name__}."
        )
    return _listing(_MemoryArrays(arrays, name), name)


def _listing(arrays, name: str) -> Listing:
    names = set(arrays.names)
    if unknown := sorted(names - {*NAMES}):
        hint = nearest(unknown[0], NAMES)
        raise ValueError(f"{name} has an array {unknown[0]!r}{hint}; known are {', '.join(NAMES)}.")
    for x, y in _FIELDS.values():
        for one, other in ((x, y), (y, x)):
            if one in names and other not in names:
                raise ValueError(f"{name} has {one} and no {other}.")
    if "x" not in names:
        raise ValueError(f"{name} has no array x with the images and no y with their labels.")
    parts = [part for part in PARTS if _FIELDS[part][0] in names]
    specs = {part: arrays.spec(_FIELDS[part][0]) for part in parts}
    for part, (shape, dtype) in specs.items():
        _check_spec(name, _FIELDS[part][0], shape, dtype)
        if shape[3:] != specs["train"][0][3:]:
            raise ValueError(
                f"{name}: {_FIELDS[part][0]} is {_shown(shape)} and x "
                f"{_shown(specs['train'][0])}; they must have as many channels."
            )
    sizes = {part: shape[0] for part, (shape, _) in specs.items()}
    columns = {part: arrays.get(_FIELDS[part][1]) for part in parts}
    labeled = None
    if "labeled" in names:
        labeled = _client_columns.flag_column("labeled", arrays.get("labeled"), sizes["train"])
    labels, label_names = _labels(name, columns, sizes, labeled)
    client_ids = None
    if "client_ids" in names:
        client_ids = _client_columns.client_id_list(arrays.get("client_ids"), sizes["train"])
    images = _ArrayImages(arrays, name, [_FIELDS[part][0] for part in parts])
    return Listing(name, labels, sizes, client_ids, label_names, images)


def _labels(name, columns, sizes, labeled) -> tuple[np.ndarray, tuple[str, ...]]:
    """(int32 [n] of all parts, names of the classes)."""
    known, found = {}, {}
    for part, column in columns.items():
        field = _FIELDS[part][1]
        column = np.asarray(column)
        if column.ndim == 2 and column.shape[1] == 1:
            column = column[:, 0]
        _client_columns.check_column(field, column, sizes[part])
        if column.dtype.kind == "S":
            column = np.char.decode(column)
        if column.dtype.kind not in "iufU":
            raise ValueError(
                f"{name}: {field} is {column.dtype}; give integers, or names of classes as "
                "np.array(names, dtype=str)."
            )
        missing = (column == "") if column.dtype.kind == "U" else (column != column)
        if column.dtype.kind in "if":
            missing |= column == NO_LABEL
        if part == "train" and labeled is not None:
            _check_all(name, field, missing & labeled, "has no label, but labeled is True there")
            missing = ~labeled
        elif part != "train":
            _check_all(name, field, missing, "has no label, which an image of that part needs")
        known[part], found[part] = ~missing, column
    if len({column.dtype.kind == "U" for column in found.values()}) > 1:
        raise ValueError(f"{name}: some labels are names and some numbers; give all in one form.")
    used = np.concatenate([found[part][known[part]] for part in found])
    if used.dtype.kind == "U":
        names, numbers = np.unique(used, return_inverse=True)
        names = tuple(map(str, names))
    else:
        for part, column in found.items():
            wrong = known[part] & ~((column >= 0) & (column == np.rint(column)))
            _check_all(name, _FIELDS[part][1], wrong, "has a label that is not 0, 1, 2, ...")
            wrong = known[part] & ~(column < MOST_CLASSES)
            problem = f"has a label of {MOST_CLASSES} or more; number the classes from 0"
            _check_all(name, _FIELDS[part][1], wrong, problem)
        numbers = used.astype(np.int64)
        names = tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))
    labels = np.full(sum(sizes.values()), NO_LABEL, np.int32)
    labels[np.concatenate(list(known.values()))] = numbers
    return labels, names


def _check_all(name: str, field: str, wrong: np.ndarray, problem: str) -> None:
    if wrong.any():
        raise ValueError(f"{name}, {field}: image {int(np.argmax(wrong))} {problem}.")


def _check_spec(name: str, field: str, shape, dtype) -> None:
    if dtype != np.uint8:
        raise ValueError(f"{name}: {field} is {dtype}; give uint8 pixels in 0..255.")
    if len(shape) not in (3, 4) or 0 in shape or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise ValueError(
            f"{name}: {field} is {_shown(shape)}; give [n, h, w, c] with c 1 or 3, or [n, h, w]."
        )


def _shown(shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _ArrayImages:
    """The pixels of arrays; see `_listing.Images`."""

    def __init__(self, arrays, name: str, fields: list[str]):
        self._arrays, self._name, self._fields = arrays, name, fields

    def read(
        self, image_size: int | None, folder: str | None
    ) -> tuple[np.ndarray, ImageSizes | None]:
        """See `ImageFiles.read`. Arrays in memory stay there, and are not copied if possible."""
        image_size = _image_files.check_image_size(image_size)
        shapes = [self._arrays.spec(field)[0] for field in self._fields]
        sizes = {tuple(shape[1:3]) for shape in shapes}
        size = _image_files.common_size(sizes, image_size, self._name)
        before = _image_files.sizes_of(sizes)
        if isinstance(self._arrays, _MemoryArrays):
            if sizes == {size} and len(shapes) == 1:
                return _with_channels(self._arrays.get(self._fields[0])), before
            return np.concatenate(list(self._blocks(shapes, size))), before
        cache = ImageCache(folder, self._arrays.path, image_size, self._arrays.key())
        images = cache.open()
        if images is None:
            with cache.locked():
                images = cache.open()
                if images is None:
                    shape = (sum(s[0] for s in shapes), *size, (*shapes[0], 1)[3])
                    images = cache.write(shape, self._blocks(shapes, size))
        return images, before

    def _blocks(self, shapes, size) -> Iterator[np.ndarray]:
        with concurrent.futures.ThreadPoolExecutor(_image_files.threads()) as pool:
            rows = (row for field in self._fields for row in self._rows(field))
            read = functools.partial(_resize, size=size)
            yield from _image_files.in_blocks(rows, read, pool, sum(shape[0] for shape in shapes))

    def _rows(self, field: str) -> Iterator[np.ndarray]:
        for block in self._arrays.blocks(field):
            yield from _with_channels(block)


def _with_channels(images: np.ndarray) -> np.ndarray:
    return images if images.ndim == 4 else images[..., np.newaxis]


def _resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if image.shape[:2] == size:
        return image
    pillow = PIL.Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    return np.asarray(_image_files.resized(pillow, size)).reshape(*size, image.shape[2])


def _check_twice(name: str, names: Collection, given: Collection) -> None:
    if len(names) < len(given):
        raise ValueError(f"{name} has both x and x_train, or both y and y_train; give one.")


class _MemoryArrays:
    """Arrays in memory, by name."""

    def __init__(self, arrays: Mapping[str, Any], name: str):
        # Name of the array here -> the array.
        self._arrays = {_ALSO_CALLED.get(key, key): value for key, value in arrays.items()}
        self.names = list(self._arrays)
        _check_twice(name, self.names, arrays)
        for field, value in self._arrays.items():
            _client_columns.check_not_masked(field, value)

    def get(self, field: str) -> np.ndarray:
        value = self._arrays[field]
        return value if field == "client_ids" else np.asarray(value)

    def spec(self, field: str) -> tuple[tuple[int, ...], np.dtype]:
        return np.shape(self.get(field)), self.get(field).dtype

    def blocks(self, field: str) -> Iterator[np.ndarray]:
        yield self.get(field)


class _NpzArrays:
    """The arrays of a file, by name; images are read piece by piece."""

    def __init__(self, path: pathlib.Path, name: str):
        self.path, self._name = str(path), name
        try:
            with zipfile.ZipFile(path) as file:
                members = [m.removesuffix(".npy") for m in file.namelist() if m.endswith(".npy")]
        except _DAMAGE as error:
            raise self._damaged(error) from error
        # Name of the array here -> in the file.
        self._members = {_ALSO_CALLED.get(member, member): member for member in members}
        self.names = list(self._members)
        _check_twice(name, self.names, members)

    def get(self, field: str) -> np.ndarray:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return file[self._members[field]]
        except ValueError as error:  # From pickled objects, and from a damaged header.
            raise ValueError(
                f"{self._name}: {field} cannot be read ({error}); save names of classes or clients "
                "as np.array(names, dtype=str)."
            ) from None
        except _DAMAGE as error:
            raise self._damaged(error) from error

    @functools.cache  # noqa: B019 (few, and small)
    def spec(self, field: str) -> tuple[tuple[int, ...], np.dtype]:
        with self._opened(field) as (_, shape, dtype):
            return shape, dtype

    def key(self) -> Iterator[str]:
        status = os.stat(self.path)
        yield f"{self.path} {status.st_size} {status.st_mtime_ns}"

    def blocks(self, field: str) -> Iterator[np.ndarray]:
        with self._opened(field) as (file, shape, dtype):
            size = int(np.prod(shape[1:]))
            step = max(_READ_BYTES // size, 1)
            for start in range(0, shape[0], step):
                number = min(step, shape[0] - start)
                content = file.read(number * size)
                if len(content) < number * size:
                    raise EOFError(f"{field} ends too early")
                yield np.frombuffer(content, dtype).reshape(number, *shape[1:])

    @contextlib.contextmanager
    def _opened(self, field: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
        """(the file where the values begin, shape, dtype) of an array."""
        headers = np.lib.format
        try:
            with zipfile.ZipFile(self.path) as file, file.open(f"{self._members[field]}.npy") as m:
                try:
                    old = headers.read_magic(m) == (1, 0)
                    read = headers.read_array_header_1_0 if old else headers.read_array_header_2_0
                    shape, fortran_order, dtype = read(m)
                except ValueError as error:
                    raise self._damaged(error) from error
                if fortran_order and len(shape) > 1:
                    raise ValueError(
                        f"{self._name}: {field} is in Fortran's order; save "
                        f"np.ascontiguousarray({field})."
                    )
                yield m, shape, dtype
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> CorruptDataError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CorruptDataError(f"{self.path} cannot be read as an .npz file ({reason}).")
