"""What comes out of a zip is what was put in, and nothing else, however it was made."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from rollbook.errors import BadFileError, UsageError
from rollbook.records.archive import pack, unpack


def anything(_: str) -> bool:
    return True


def opened(path: Path, target: Path, *, most_bytes: int = 10_000, most_files: int = 10) -> Path:
    unpack(path, target, is_allowed=anything, most_bytes=most_bytes, most_files=most_files)
    return target


def test_there_and_back_and_the_same_bytes_again(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.json").write_bytes(b"{}" * 300)
    (tmp_path / "a" / "b" / "y.safetensors").write_bytes(bytes(range(256)))
    pack(tmp_path / "a", tmp_path / "one.zip")
    pack(tmp_path / "a", tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    target = opened(tmp_path / "one.zip", tmp_path / "out")
    for name in ("x.json", "b/y.safetensors"):
        assert (target / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_what_lies_about_its_size_is_cut_off(tmp_path: Path) -> None:
    """Its directory says 10 bytes; what is packed are 5,000."""
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"0" * 5000)
    data = path.read_bytes().replace(struct.pack("<L", 5000), struct.pack("<L", 10))
    path.write_bytes(data)
    with pytest.raises(BadFileError):
        opened(path, tmp_path / "out", most_bytes=100)
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*")) <= 100


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a\\..\\x"])
def test_no_name_leads_out_even_where_all_are_allowed(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(BadFileError, match="does not belong there"):
        opened(tmp_path / "a.zip", tmp_path / "deep" / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.zip"}


def test_too_many_files_doubled_names_and_locked_ones_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(11):
            archive.writestr(str(number), b"x")
    with pytest.raises(BadFileError, match="has 11 files"):
        opened(tmp_path / "many.zip", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        archive.writestr("x", b"1")
        archive.writestr("X", b"2")
    with pytest.raises(BadFileError, match="two files 'X'"):
        opened(tmp_path / "twice.zip", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "odd.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x", b"1")
    with pytest.raises(BadFileError, match="packed in a way"):
        opened(tmp_path / "odd.zip", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "locked.zip", "w") as archive:
        archive.writestr("x", b"1")
    data = bytearray((tmp_path / "locked.zip").read_bytes())
    place = data.index(b"PK\x01\x02")
    data[place + 8] |= 1  # the flag of an encrypted file
    (tmp_path / "locked.zip").write_bytes(data)
    with pytest.raises(BadFileError, match="packed in a way"):
        opened(tmp_path / "locked.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_zip_or_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_text("no zip")
    with pytest.raises(BadFileError, match="not a whole zip"):
        opened(tmp_path / "x.zip", tmp_path / "out")
    with pytest.raises(UsageError, match="no such file"):
        opened(tmp_path / "y.zip", tmp_path / "out")
    (tmp_path / "large.zip").write_bytes(b"0" * 101)
    with pytest.raises(BadFileError, match="larger than 100 bytes"):
        opened(tmp_path / "large.zip", tmp_path / "out", most_bytes=100)
