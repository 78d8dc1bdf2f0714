"""Files that are whole, old or new, and never anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actmem.files import replace_file
from actmem.planning import Action, Plan, Rule

WRITING = """
import resource, signal, sys
from actmem.planning import Action, Plan, Rule
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
Plan("new", tuple(Rule("op%d" % i, Action.RECOMPUTE) for i in range(50))).save(sys.argv[1])
"""


def test_a_write_that_fails_leaves_the_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan("old", (Rule(".*", Action.RECOMPUTE),)).save(path)
    before = path.read_text()
    assert subprocess.run([sys.executable, "-c", WRITING, str(path)], capture_output=True, check=False).returncode
    assert path.read_text() == before


def test_nothing_is_left_beside_a_file(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", "new")
    with pytest.raises(UnicodeEncodeError):
        replace_file(tmp_path / "a", "half a pair: \ud800")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "new")]


def test_a_missing_folder_is_told_by_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(tmp_path / "no" / "file", "text")
    assert caught.value.filename == str(tmp_path / "no" / "file")


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    replace_file(file, "old")
    file.chmod(0o640)
    link.symlink_to(file)
    replace_file(link, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)


def test_what_is_no_plain_file_is_written_to_or_refused(tmp_path: Path) -> None:
    replace_file("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(IsADirectoryError) as caught:
        replace_file(tmp_path, "text")
    assert caught.value.filename == str(tmp_path) or caught.value.filename == tmp_path
