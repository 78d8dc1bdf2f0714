"""Files: those that load, and every way in which one cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actmem.config.loading import load_config
from actmem.config.rules import idle_settings
from actmem.config.schema import PRESET_NAMES
from actmem.errors import ConfigError, Fault

REPOSITORY = Path(__file__).parents[2]


def only_fault(path: Path) -> Fault:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.source == str(path)
    (fault,) = caught.value.faults
    return fault


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_of_the_repository_are_sound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = load_config(path)
    assert config.model.name in PRESET_NAMES
    assert all(any(REPOSITORY.glob(pattern)) for pattern in config.data.path)
    assert idle_settings(config) == ()


def test_overrides_are_laid_over_a_file() -> None:
    config = load_config(str(REPOSITORY / "configs/dense.yaml"), ["train.steps=20", "policy=none"])
    assert (config.train.steps, config.policy) == (20, "none")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: qwen3-tiny}\ndata: {path: [a]}\n", encoding="utf-8-sig")
    assert load_config(path).model.name == "qwen3-tiny"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"abc\xff\xfe")
    assert only_fault(binary).problem == "is not UTF-8 text: byte 0xff at offset 3"
    assert only_fault(tmp_path / "missing.yaml").problem == "does not exist"
    assert only_fault(tmp_path).problem == "is a directory"
    assert only_fault(binary / "inside").problem == "cannot be read: Not a directory"
    assert "null byte" in only_fault(Path("a\0b")).problem


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero, a file without an end")
def test_a_file_without_an_end_is_not_read_to_it() -> None:
    assert only_fault(Path("/dev/zero")).problem == "is larger than 1 MiB"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="file modes do not bind this user")
def test_a_file_one_may_not_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.touch(mode=0o000)
    assert only_fault(path).problem == "cannot be read: Permission denied"
