"""Fetches and reads MedMNIST's published npz files."""

import contextlib
import functools
import hashlib
import http.client
import importlib.util
import math
import os
import pathlib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np
import tqdm

from tff_fedlabel.datasets import _download_lock
from tff_fedlabel.datasets._published import Batches, Published
from tff_fedlabel.datasets._source_errors import CorruptDataError, DataNotFoundError, reason

NAMES = ("organamnist", "bloodmnist")
IMAGE_SIZES = (28, 64, 128, 224)
_BATCH_BYTES = 1 << 20
_CHUNK = 1 << 18
_ATTEMPTS = 5
_TIMEOUT_SECONDS = 30
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_PUBLISHED_KEYS = {"train": "train", "validation": "val", "test": "test"}


@functools.cache
def _medmnist_info() -> dict:
    """`medmnist.INFO`, read from its own file.

    `import medmnist` runs data set classes that need torch, and prints a line if it is absent.
    """
    package = importlib.util.find_spec("medmnist")
    path = pathlib.Path(package.submodule_search_locations[0]) / "info.py"
    spec = importlib.util.spec_from_file_location("_medmnist_info", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.INFO


def open_npz(name: str, image_size: int, data_dir: str | None, download: bool) -> Published:
    """Opens one of `NAMES` in one of `IMAGE_SIZES`; see `sources.load` for arguments and errors."""
    info = _medmnist_info()[name]
    suffix = "" if image_size == IMAGE_SIZES[0] else f"_{image_size}"
    url, md5 = info[f"url{suffix}"], info[f"MD5{suffix}"]
    path = pathlib.Path(data_dir or "~/.medmnist").expanduser() / f"{name}{suffix}.npz"
    if not path.is_file():
        where = f"put {path.name} from {url} at {path}"
        if not download:
            raise DataNotFoundError(f"{name} is not on disk: {where}")
        _download(name, url, md5, path, where)
    found = _md5(path)
    if found != md5:
        raise CorruptDataError(
            f"{name}: {path} has MD5 {found}, not {md5}; delete it and download it again"
        )
    return _open_file(name, image_size, info, path)


def _open_file(name: str, image_size: int, info: dict, path: pathlib.Path) -> Published:
    label_names = tuple(info["label"][key] for key in sorted(info["label"], key=int))
    sizes, channels = {}, set()
    with _damage_as_corrupt_data(name, path), zipfile.ZipFile(path) as archive:
        for split, key in _PUBLISHED_KEYS.items():
            with archive.open(f"{key}_images.npy") as file:
                shape = _image_shape(file)
            if shape[1:3] != (image_size, image_size):
                raise ValueError(f"images are {shape[1]} x {shape[2]}")
            sizes[split] = shape[0]
            channels.add(shape[3])
        if len(channels) != 1:
            raise ValueError(f"images have {sorted(channels)} channels")

    def read(split: str) -> Batches:
        return _read_split(name, path, _PUBLISHED_KEYS[split])

    return Published(sizes, (image_size, image_size, channels.pop()), label_names, read)


@contextlib.contextmanager
def _damage_as_corrupt_data(name: str, path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptDataError(
            f"{name}: {path} is not a MedMNIST file ({reason(error)}); delete it and download it "
            "again"
        ) from error


def _read_split(name: str, path: pathlib.Path, key: str) -> Batches:
    """Yields batches while unpacking: at 224 pixels a whole split takes gigabytes."""
    with _damage_as_corrupt_data(name, path), zipfile.ZipFile(path) as archive:
        with archive.open(f"{key}_labels.npy") as file:
            labels = np.lib.format.read_array(file, allow_pickle=False)
        with archive.open(f"{key}_images.npy") as file:
            number, *shape = _image_shape(file)
            if labels.size != number or not np.issubdtype(labels.dtype, np.integer):
                raise ValueError(f"labels are {labels.dtype} {labels.shape} for {number} images")
            labels = labels.reshape(-1)
            batch = max(_BATCH_BYTES // math.prod(shape), 1)
            for start in range(0, number, batch):
                part = labels[start : start + batch]
                size = len(part) * math.prod(shape)
                content = file.read(size)
                if len(content) != size:
                    raise ValueError(f"{key}_images ends early")
                yield np.frombuffer(content, np.uint8).reshape(len(part), *shape), part


def _image_shape(file) -> tuple[int, int, int, int]:
    """The shape in an npy file's header as [n, h, w, c], even if it is stored as [n, h, w]."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"npy version {version}")
    shape, by_column, dtype = _HEADERS[version](file)
    if len(shape) == 3:
        shape = (*shape, 1)
    if dtype != np.uint8 or by_column or len(shape) != 4 or shape[-1] not in (1, 3):
        raise ValueError(f"images are {dtype} {shape}")
    return shape


def _md5(path: pathlib.Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _download(name, url, md5, path: pathlib.Path, where: str) -> None:
    """Fetches `url` to `path`, unless another process does so meanwhile."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _download_lock.one_at_a_time(lock, name) as locked:
            # Without a lock each process writes its own file, which the next cannot resume.
            suffix = ".part" if locked else f".{os.getpid()}.part"
            if not path.is_file():
                _fetch_whole(name, url, md5, path, path.with_name(path.name + suffix), where)
    except DataNotFoundError:  # An OSError, too.
        raise
    except OSError as error:
        raise DataNotFoundError(
            f"{name} could not be downloaded ({reason(error)}): {where}"
        ) from error


def _fetch_whole(name, url, md5, path: pathlib.Path, part: pathlib.Path, where: str) -> None:
    """Fetches `url` to `path` via `part`: resumable, checked, moved into place when complete."""
    try:
        resumed = _size(part) > 0
        _fetch(name, url, part)
        if resumed and _md5(part) != md5:
            # The partial file belonged to another file: start again from the first byte.
            part.unlink()
            _fetch(name, url, part)
    except (OSError, http.client.HTTPException) as error:
        kept = f"; {part} is kept and continued next time" if _size(part) else ""
        raise DataNotFoundError(
            f"{name} could not be downloaded ({reason(error)}){kept}: {where}"
        ) from error
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise CorruptDataError(f"{name}: the file at {url} has MD5 {found}, not {md5}: {where}")
    os.replace(part, path)  # Not by `_replacing`, which keeps nothing of what was broken off.


def _fetch(name: str, url: str, part: pathlib.Path) -> None:
    """Completes `part`, resuming where the connection broke."""
    for attempt in range(_ATTEMPTS):
        before = _size(part)
        try:
            _fetch_once(name, url, part)
            return
        except (OSError, http.client.HTTPException):
            # An attempt that received nothing (no network, not found) is not worth repeating.
            if attempt == _ATTEMPTS - 1 or _size(part) <= before:
                raise


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch_once(name: str, url: str, part: pathlib.Path) -> None:
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "tff-fedlabel"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            return  # The server has no further bytes; the checksum decides.
        raise
    with response:
        if response.status != 206:
            have = 0  # The server ignored the range and sends the whole file.
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with (
            open(part, "ab" if have else "wb") as file,
            tqdm.tqdm(
                total=total, initial=have, unit="B", unit_scale=True, desc=name, disable=None
            ) as bar,
        ):
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
                have += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke after {have} of {total} bytes")
