"""Fetches and reads MedMNIST's published npz files."""

import functools
import hashlib
import http.client
import importlib.util
import os
import pathlib
import urllib.error
import urllib.request
import zipfile
import zlib

import numpy as np
import tqdm

from tff_fedlabel.datasets._published import Published
from tff_fedlabel.datasets._source_errors import CorruptDataError, DataNotFoundError, reason

NAMES = ("organamnist", "bloodmnist")
_CHUNK = 1 << 18
_ATTEMPTS = 5
_TIMEOUT_SECONDS = 30
_PUBLISHED_KEYS = {"train": "train", "validation": "val", "test": "test"}


@functools.cache
def _medmnist_info() -> dict:
    """`medmnist.INFO`, read from its own file.

    `import medmnist` runs data set classes that want torch, and prints a line when it is absent.
    """
    package = importlib.util.find_spec("medmnist")
    path = pathlib.Path(package.submodule_search_locations[0]) / "info.py"
    spec = importlib.util.spec_from_file_location("_medmnist_info", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.INFO


def open_npz(name: str, data_dir: str | None, download: bool) -> Published:
    """Opens one of `NAMES`; see `sources.load` for arguments and errors."""
    info = _medmnist_info()[name]
    path = pathlib.Path(data_dir or "~/.medmnist").expanduser() / f"{name}.npz"
    if not path.is_file():
        where = f"put {path.name} from {info['url']} at {path}"
        if not download:
            raise DataNotFoundError(f"{name} is not on disk: {where}")
        _download(name, info["url"], info["MD5"], path, where)
    found = _md5(path)
    if found != info["MD5"]:
        raise CorruptDataError(
            f"{name}: {path} has MD5 {found}, not {info['MD5']}; delete it and get it again"
        )
    return _open_file(name, info, path)


def _open_file(name: str, info: dict, path: pathlib.Path) -> Published:
    splits = {}
    label_names = tuple(info["label"][key] for key in sorted(info["label"], key=int))
    try:
        with np.load(path, allow_pickle=False) as file:
            for split, key in _PUBLISHED_KEYS.items():
                splits[split] = _split_arrays(file[f"{key}_images"], file[f"{key}_labels"])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptDataError(
            f"{name}: {path} is not a MedMNIST file ({error}); delete it and get it again"
        ) from error
    shapes = {images.shape[1:] for images, _ in splits.values()}
    if len(shapes) != 1:
        raise CorruptDataError(f"{name}: {path} has splits of different image shapes {shapes}")
    sizes = {split: len(labels) for split, (_, labels) in splits.items()}
    # A split is dropped once it is handed over, so that it is not held beside its copy.
    return Published(sizes, shapes.pop(), label_names, lambda split: iter([splits.pop(split)]))


def _split_arrays(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images as [n, h, w, c], labels as [n]; ValueError when they are something else."""
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ValueError(f"images are {images.dtype} {images.shape}")
    if labels.size != len(images) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels are {labels.dtype} {labels.shape} for {len(images)} images")
    return images, labels.reshape(-1)


def _md5(path: pathlib.Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _download(name, url, md5, path: pathlib.Path, where: str) -> None:
    """Fetches `url` to `path`: resumable, checked, and in place only when whole."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        resumed = _size(part) > 0
        _fetch(name, url, part)
        if resumed and _md5(part) != md5:
            # What was there belonged to another file: once more from the first byte.
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
    os.replace(part, path)


def _fetch(name: str, url: str, part: pathlib.Path) -> None:
    """Brings `part` to full length, picking up where the connection broke."""
    for attempt in range(_ATTEMPTS):
        before = _size(part)
        try:
            _fetch_once(name, url, part)
            return
        except (OSError, http.client.HTTPException):
            # An attempt that brought nothing (no network, not found) is not worth repeating.
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
            return  # Nothing lies beyond what is here; the checksum decides.
        raise
    with response:
        if response.status != 206:
            have = 0  # The server sends the whole file whatever was asked.
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
