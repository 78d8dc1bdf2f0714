from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from actmem.config.schema import ModelConfig, TrainConfig
from actmem.errors import CheckpointError
from actmem.models.building import build_model
from actmem.parallel import MeshSizes, build_mesh
from actmem.parallel.world import World
from actmem.training.checkpoint import Checkpoints, describe
from actmem.training.optimizer import build_optimizer

ALONE = World(build_mesh(MeshSizes(), "cpu"), torch.device("cpu"), 0, 1)
SHAPE: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 400,
}


def run_state(root: Path, *, keep: int = 2, seed: int = 0, **fields: object) -> tuple[PreTrainedModel, Checkpoints]:
    """A model that has taken one optimizer step, so that the optimizer has a state, and its checkpoints."""
    model = build_model(ModelConfig(config=SHAPE | fields), seed=seed)
    optimizer = build_optimizer(model.parameters(), TrainConfig())
    model(input_ids=torch.arange(8).reshape(1, 8)).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, Checkpoints(root, [model], optimizer, keep=keep, world=ALONE, description=describe(model))


def damage(path: Path, kind: str) -> None:
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if kind == "cut short":
        weights.write_bytes(content[:-10])
    elif kind == "one bit turned":
        content[-10] ^= 1
        weights.write_bytes(content)
    elif kind == "file missing":
        weights.unlink()
    elif kind == "manifest missing":
        (path / "manifest.json").unlink()
    elif kind == "manifest cut short":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-10])


DAMAGES = {
    "cut short": r"model\.safetensors has \d+ bytes, and \d+ were written",
    "one bit turned": r"model\.safetensors has other contents",
    "file missing": r"model\.safetensors is missing",
    "manifest missing": r"manifest\.json is missing",
    "manifest cut short": r"manifest\.json cannot be read",
}


def test_everything_comes_back(tmp_path: Path) -> None:
    model, checkpoints = run_state(tmp_path)
    checkpoints.save(7, {"epoch": 1, "index": 2, "stream": "x"})
    expected = torch.rand(3)
    other, restored = run_state(tmp_path, seed=9)
    resumed = restored.resume()
    assert resumed is not None
    assert (resumed.step, resumed.position) == (7, {"epoch": 1, "index": 2, "stream": "x"})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.rand(3), expected)
    ours, theirs = checkpoints._optimizer_tensors(), restored._optimizer_tensors()
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3 * len(list(model.parameters()))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    path = run_state(tmp_path)[1].save(1, {})
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:  # type: ignore[no-untyped-call]
            assert tensors.keys()


def test_tied_parameters_are_stored_once(tmp_path: Path) -> None:
    path = run_state(tmp_path, tie_word_embeddings=True)[1].save(1, {})
    with safe_open(path / "model.safetensors", "pt") as tensors:  # type: ignore[no-untyped-call]
        assert [key for key in tensors.keys() if "embed" in key or "lm_head" in key] == ["model.embed_tokens.weight"]  # noqa: SIM118


def test_no_checkpoint_is_no_resume(tmp_path: Path) -> None:
    assert run_state(tmp_path / "none yet")[1].resume() is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    _, checkpoints = run_state(tmp_path, keep=2)
    for step in (1, 2, 10, 9):
        checkpoints.save(step, {})
    assert [path.name for path in checkpoints.steps()] == ["step-00000009", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    _, checkpoints = run_state(tmp_path)
    checkpoints.save(1, {"index": 1})
    checkpoints.save(1, {"index": 2})
    resumed = checkpoints.resume()
    assert resumed is not None
    assert resumed.position == {"index": 2}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, kind: str) -> None:
    _, checkpoints = run_state(tmp_path, keep=1)
    older = tmp_path / "keep"
    checkpoints.save(1, {}).rename(older)
    newest = checkpoints.save(2, {})
    older.rename(tmp_path / "step-00000001")
    damage(newest, kind)
    with pytest.warns(UserWarning, match=rf"resumed from the older step-00000001: step-00000002: {DAMAGES[kind]}"):
        resumed = checkpoints.resume()
    assert resumed is not None
    assert resumed.step == 1
    # Out of the way: it must not count as the newest one to keep.
    assert (tmp_path / "damaged-step-00000002").is_dir()
    checkpoints.save(2, {})
    assert [path.name for path in checkpoints.steps()] == ["step-00000002"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path, kind: str) -> None:
    _, checkpoints = run_state(tmp_path)
    damage(checkpoints.save(1, {}), kind)
    with pytest.raises(CheckpointError, match=rf"no checkpoint in .* is intact \(step-00000001: {DAMAGES[kind]}"):
        checkpoints.resume()
    assert (tmp_path / "step-00000001").is_dir()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers is 2 there, 1 here"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-06 there, 1e-05 here"),
        ({"vocab_size": 500}, r"lm_head\.weight is torch\.float32 \[400, 64\] there, torch\.float32 \[500, 64\] here"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_differences(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    run_state(tmp_path)[1].save(1, {})
    model, checkpoints = run_state(tmp_path, **fields)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        checkpoints.resume()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_checkpoint_of_another_format(tmp_path: Path) -> None:
    _, checkpoints = run_state(tmp_path)
    manifest = checkpoints.save(1, {}) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    with pytest.raises(CheckpointError, match="has format 3; allowed: 1, 2;"):
        checkpoints.resume()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_the_old_and_nothing_else(tmp_path: Path) -> None:
    _, checkpoints = run_state(tmp_path, keep=1)
    checkpoints.save(1, {})
    with file_size_limit(100_000), pytest.raises(CheckpointError, match="step 2 cannot be written"):
        checkpoints.save(2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    resumed = checkpoints.resume()
    assert resumed is not None
    assert resumed.step == 1


def test_a_full_disk_leaves_the_old_and_nothing_else(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small tmpfs here")
    try:
        _, checkpoints = run_state(disk / "checkpoints", keep=2)
        checkpoints.save(1, {})
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.save(2, {})
        assert [path.name for path in checkpoints.root.iterdir()] == ["step-00000001"]
        resumed = checkpoints.resume()
        assert resumed is not None
        assert resumed.step == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Large enough that writing it takes long enough to be interrupted.
_ENDLESS_SAVING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import run_state
_, checkpoints = run_state(Path(sys.argv[1]), vocab_size=60_000)
for step in range(1, 1000):
    checkpoints.save(step, {})
"""


def test_killed_in_the_middle_of_a_write_it_resumes_from_the_one_before(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _ENDLESS_SAVING, str(tmp_path), str(Path(__file__).parent)])
    try:
        _wait_for(lambda: any(tmp_path.glob("step-*[0-9]")), child)
        _wait_for(lambda: any(tmp_path.glob("*.partial/*")), child)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert any(tmp_path.glob("*.partial"))
    _, checkpoints = run_state(tmp_path, vocab_size=60_000)
    newest = checkpoints.steps()[-1]
    resumed = checkpoints.resume()
    assert resumed is not None
    assert resumed.path == newest
    assert not any(tmp_path.glob("*.partial"))


def _wait_for(condition: object, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert child.poll() is None, "the child ended by itself"
        assert time.monotonic() < deadline, "the child wrote nothing in a minute"
        time.sleep(0.0005)
