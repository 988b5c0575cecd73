"""Files and folders that are written in one step, and what killed processes leave."""

import pytest

from tff_fedlabel import _replacing


def test_a_failure_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    for name in ("file", "folder"):
        with pytest.raises(OSError, match="full"), _replacing.replacing(tmp_path / name) as partial:
            partial.mkdir() if name == "folder" else partial.write_text("new")
            raise OSError("full")
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_is_not_replaced_by_a_file_nor_a_file_by_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    (tmp_path / "file").write_text("old")
    with pytest.raises(_replacing.OutputError, match="folder is a folder, not a file"):
        with _replacing.replacing(tmp_path / "folder") as partial:
            partial.write_text("new")
    with pytest.raises(_replacing.OutputError, match="file is a file, not a folder"):
        with _replacing.replacing(tmp_path / "file") as partial:
            partial.mkdir()
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def killed_while_writing(path):
    """The partial file of a process that could not remove it."""
    with pytest.raises(FileNotFoundError), _replacing.replacing(path) as partial:
        partial.write_text("half")
        kept = partial.rename(path.with_name("kept"))
    return kept.rename(partial)


@pytest.mark.parametrize("name", ["a.json", "a[1].npy", "folder"])
def test_left_overs_are_known_and_removed(name, tmp_path):
    others = ["a.json", "a.npy", "abc.json", ".a.partial.json", ".hidden", ".b.partial-7.json"]
    for other in others:
        (tmp_path / other).write_text("other")
    left_over = killed_while_writing(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir() if _replacing.is_left_over(p)] != []
    assert _replacing.is_left_over(left_over)
    assert not any(_replacing.is_left_over(tmp_path / other) for other in others[:-1])
    _replacing.remove_left_overs(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_but_a_file_is_replaced_and_only_on_request(overwrite, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    _replacing.check_free(tmp_path / "new", overwrite)
    with pytest.raises(_replacing.OutputError, match="folder is there and is no file"):
        _replacing.check_free(tmp_path / "folder", overwrite)
    if overwrite:
        _replacing.check_free(tmp_path / "file", overwrite)
    else:
        with pytest.raises(_replacing.OutputError, match="file exists; --overwrite"):
            _replacing.check_free(tmp_path / "file", overwrite)
