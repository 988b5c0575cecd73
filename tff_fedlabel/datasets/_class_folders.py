"""Finds the images of a folder of class folders: their classes, clients and parts.

DIR/<class>/*.png                       classes
DIR/<client>/<class>/*.png              clients that hold classes
DIR/unlabeled/*.png                     images without label; a client may have its own
DIR/train/..., DIR/validation/<class>/..., DIR/test/<class>/...
"""

import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from tff_fedlabel.datasets._client_columns import NO_LABEL
from tff_fedlabel.datasets._image_files import SUFFIXES, ImageFiles
from tff_fedlabel.datasets._listing import PARTS, Listing
from tff_fedlabel.datasets._source_errors import DataNotFoundError, UnusableFilesError

_UNLABELED = ("unlabeled", "unlabelled")
# What other data sets call their parts: taken for clients, they would be trained on.
_LIKE_PARTS = {
    **dict.fromkeys(("training", "trainset", "train_set"), "train"),
    **dict.fromkeys(("val", "valid", "dev"), "validation"),
    **dict.fromkeys(("testing", "testset", "test_set"), "test"),
}
# What desktops leave behind in folders of images.
_IGNORED = ("thumbs.db", "desktop.ini")


def list_folder(folder: pathlib.Path, name: str) -> Listing:
    """Lists the images of `folder`, without opening them.

    Raises:
      ValueError: the folders are not in one of the forms above.
      UnusableFilesError: files among the images that are none, or lie where they have no class.
    """
    wrong: list[tuple[str, str]] = []
    subfolders = _subfolders(folder)
    unlabeled = [name for name in subfolders if name in _UNLABELED]
    if "train" in subfolders:
        beside = sorted({*subfolders} - {*PARTS, *unlabeled})
        if beside:
            raise ValueError(
                f"{folder} has {beside[0]!r} beside 'train'; only 'validation', 'test' and "
                "'unlabeled' may be there."
            )
        train = [*_list_part(folder / "train", wrong)]
        for _, files in _list_classes(folder, unlabeled, wrong):
            _refuse_ownerless(folder / unlabeled[0], any(client for client, _, _ in train))
            train.append((None, None, files))
    else:
        train = [*_list_part(folder, wrong, leave_out=PARTS)]
    found = {"train": train}
    for part in PARTS[1:]:
        if part in subfolders:
            found[part] = [*_list_part(folder / part, wrong, is_training=False)]
    if wrong:
        raise UnusableFilesError(str(folder), wrong)
    return _listing(folder, name, found)


def _listing(folder, name, found) -> Listing:
    found = {part: groups for part, groups in found.items() if groups}
    if "train" not in found:
        raise ValueError(
            f"{folder} has no images in class folders ({folder.name}/<class>/*.png, *.jpg, *.jpeg)."
        )
    names = _in_order({c for groups in found.values() for _, c, _ in groups} - {None})
    number = {label: k for k, label in enumerate(names)}
    files, labels, owners, sizes = [], [], [], {}
    for part, groups in found.items():
        for client, label, paths in groups:
            files += paths
            labels += [number.get(label, NO_LABEL)] * len(paths)
            owners += [client] * len(paths) if part == "train" else []
        sizes[part] = len(labels) - sum(sizes.values())
    has_clients = any(owner is not None for owner in owners)
    return Listing(
        name,
        np.array(labels, np.int32),
        sizes,
        owners if has_clients else None,
        tuple(names),
        ImageFiles(folder, files),
    )


def _list_part(
    folder: pathlib.Path, wrong: list, *, is_training: bool = True, leave_out: Sequence[str] = ()
) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """(client, class, files) of class folders, or of client folders with class folders.

    The client is None where there are none, or where nobody needs to know (of a test part); the
    class is None for images without label.
    """
    _note_outside(folder, wrong)
    children = [child for child in _subfolders(folder) if child not in leave_out]
    classes = [child for child in children if child not in _UNLABELED]
    deep = [child for child in classes if _subfolders(folder / child)]
    for child in deep if leave_out else ():
        if child.lower() in _LIKE_PARTS:
            part = _LIKE_PARTS[child.lower()]
            raise ValueError(
                f"{folder / child} holds folders and would be a client; if it is a part of the "
                f"data, name it {part!r}."
            )
    flat = [child for child in classes if child not in deep and _files(folder / child)]
    if deep and flat:
        raise ValueError(
            f"{folder} mixes class folders ({flat[0]!r} holds files) and client folders "
            f"({deep[0]!r} holds folders); put the images of each client into <client>/<class>/."
        )
    if not deep:
        for label, files in _list_classes(folder, children, wrong, is_training):
            yield None, label, files
        return
    for child in children:
        if child in _UNLABELED:
            _refuse_ownerless(folder / child, bool(_files(folder / child)))
    for client in deep:
        _note_outside(folder / client, wrong)
        names = _subfolders(folder / client)
        for label, files in _list_classes(folder / client, names, wrong, is_training):
            yield (client if is_training else None), label, files


def _list_classes(
    folder: pathlib.Path, names: Sequence[str], wrong: list, is_training: bool = True
) -> Iterator[tuple[str | None, list[str]]]:
    """(class, files) of those folders `names` that hold any; None for images without label."""
    for label in names:
        for child in _subfolders(folder / label):
            raise ValueError(
                f"{folder / label / child} is too deep; images lie in <class>/ or in "
                "<client>/<class>/."
            )
        files = _images(folder / label, wrong)
        if files and label in _UNLABELED and not is_training:
            raise ValueError(
                f"{folder / label}: images without a label can only be training images; move "
                "them out of there."
            )
        if files:
            yield (None if label in _UNLABELED else label), files


def _refuse_ownerless(folder: pathlib.Path, there_are_clients: bool) -> None:
    if there_are_clients:
        raise ValueError(
            f"{folder} does not say which client holds its images; put them into "
            f"<client>/{folder.name}/."
        )


def _images(folder: pathlib.Path, wrong: list) -> list[str]:
    """The images of a folder; notes what is none."""
    images = []
    for file in _files(folder):
        if file.lower().endswith(SUFFIXES):
            images.append(str(folder / file))
        else:
            wrong.append((str(folder / file), "its name does not end in .png, .jpg or .jpeg"))
    return images


def _note_outside(folder: pathlib.Path, wrong: list) -> None:
    for file in _files(folder):
        if file.lower().endswith(SUFFIXES):
            wrong.append((str(folder / file), "it lies outside the class folders"))


def _subfolders(folder: pathlib.Path) -> list[str]:
    names = _names(folder, folders=True)
    for name in names:
        _check_name(folder, name)
    return names


def _files(folder: pathlib.Path) -> list[str]:
    return [name for name in _names(folder, folders=False) if name.lower() not in _IGNORED]


def _names(folder: pathlib.Path, *, folders: bool) -> list[str]:
    """Names of the folders or of the files in a folder, hidden ones left out."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                e.name for e in entries if not e.name.startswith(".") and _is_dir(e) == folders
            )
    except OSError as error:
        raise DataNotFoundError(f"{folder} cannot be read ({error.strerror}).") from error


def _is_dir(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link that leads to itself: named as a file that cannot be read.
        return False


def _check_name(folder: pathlib.Path, name: str) -> None:
    """Raises ValueError for a folder that would be taken for a class or a client by mistake."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{folder} has a folder {os.fsencode(name)!r}, whose name is not UTF-8; rename it."
        ) from None
    meant = name.lower()
    if meant in (*PARTS, *_UNLABELED) and name != meant:
        raise ValueError(f"{folder} has a folder {name!r}; name it {meant!r}.")


def _in_order(names: set[str]) -> list[str]:
    """Alphabetically; numbers by their value, so that 10 comes after 9."""
    if all(name.isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
