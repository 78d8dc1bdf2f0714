"""Known devices, and every fault of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from actmem.errors import ActmemError, HardwareError
from actmem.hardware import device_names, load_hardware, parse_hardware, recognise_device, save_hardware
from actmem.hardware.profile import Hardware, Rate


def faults_of(text: str) -> list[str]:
    with pytest.raises(HardwareError) as caught:
        parse_hardware(text, "mine.yaml")
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize("name", device_names())
def test_every_shipped_device_is_sound(name: str) -> None:
    device = load_hardware(name)
    assert device.name == name
    assert device.times == "modelled" and not device.measured_ops
    assert (device.link is None) == (name == "cpu")
    assert device.allocation_bytes == (1 if name == "cpu" else 512)


def test_figures_stand_as_their_source_has_them() -> None:
    gh200, h200 = load_hardware("gh200"), load_hardware("h200-sxm")
    assert gh200.link is not None
    assert (gh200.link.out_bytes_per_second, gh200.link.in_bytes_per_second) == (
        Rate(peak=450e9, reached=297e9),
        Rate(peak=450e9, reached=375e9),
    )
    assert h200.matmul_flops_per_second == Rate(peak=989e12, reached=788e12)
    assert h200.memory_bytes == 141 * 10**9
    assert load_hardware("ascend-910b2").vector_flops_per_second == Rate(peak=22.1e12)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("h100", "h100-sxm"), ("H100-SXM", "h100-sxm"), ("h100_sxm", "h100-sxm"), ("A100", "a100-sxm-80g"),
        ("910B2", "ascend-910b2"), ("Ascend910B3", "ascend-910b3"), ("CPU", "cpu"), ("MI300X", "mi300x"),
        ("RTX4090", "rtx-4090"), ("3090", "rtx-3090"),
    ],
)  # fmt: skip
def test_names_and_aliases(called: str, name: str) -> None:
    assert load_hardware(called).name == name


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"), ("Ascend910B2", "ascend-910b2"), ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40S", "l40s"),
    ],
)  # fmt: skip
def test_what_a_driver_calls_a_device(description: str, name: str | None) -> None:
    found = recognise_device(description)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(("wrong", "meant"), [("h100-sx", "h100-sxm"), ("a10", "a100-sxm-80g"), ("gh20", "gh200")])
def test_an_unknown_name_tells_the_known_and_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(HardwareError, match=wrong) as caught:
        load_hardware(wrong)
    assert isinstance(caught.value, ActmemError) and isinstance(caught.value, ValueError)
    (fault,) = caught.value.faults
    assert fault.nearest == meant
    assert fault.allowed is not None and all(name in fault.allowed for name in device_names())


def test_a_name_like_no_other_has_no_nearest() -> None:
    with pytest.raises(HardwareError) as caught:
        load_hardware("quantum")
    assert caught.value.faults[0].nearest is None


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("100.0e12", "0", "matmul_flops_per_second: 0 is out of range; allowed: greater than or equal to 1000000"),
        ("100.0e12", "-1.0e12", "matmul_flops_per_second: -1e+12 is out of range"),
        ("100.0e12", ".inf", "matmul_flops_per_second: inf is not finite; allowed: a finite number"),
        ("100.0e12", ".nan", "matmul_flops_per_second: nan is not finite"),
        ("100.0e12", "989", "matmul_flops_per_second: 989 is out of range"),
        ("100.0e12", "1.0e21", "matmul_flops_per_second: 1e+21 is out of range; allowed: less than or equal to"),
        ("100.0e12", "fast", "matmul_flops_per_second: 'fast' is text"),
        ("100.0e12", "true", "matmul_flops_per_second: true is a truth value"),
        ("100.0e12", "null", "matmul_flops_per_second: null is nothing"),
        ("100.0e12", "{peak: 1.0e12, reachd: 1.0e11}", "did you mean 'reached'"),
        ("100.0e12", "{reached: 1.0e11}", "matmul_flops_per_second.peak: is missing"),
        ("reached: 0.9e12", "reached: 1.1e12", "reached: 1.1e+12 is out of range; allowed: at most the peak of 1e+12"),
        ("reached: 0.9e12", "reached: 900", "memory_bytes_per_second.reached: 900 is out of range"),
        ("16GiB", "16", "memory_bytes: 16 is out of range"),
        ("16GiB", "lots", "memory_bytes: 'lots' is text; allowed: a number of bytes such as 1048576 or '64GiB'"),
        ("16GiB", "9" * 400, "memory_bytes: is a number of more than 64 bits"),
        ("16GiB", "9" * 400 + "GiB", "memory_bytes: '9"),
        ("name: round", "name: round\nworkspace_bytes: 16GiB", "workspace_bytes: '16GiB' is out of range"),
        ("allocation_bytes: 512", "allocation_bytes: 0", "allocation_bytes: 0 is out of range"),
        ("allocation_bytes: 512", "allocation_bytes: 1.5", "allocation_bytes: 1.5 is a number"),
        ("out_bytes_per_second: {peak: 20.0e9", "out_bytes_per_second: {peak: 2.0e12", "link: "),
        ("duplex: 0.75", "duplex: 1.5", "link.duplex: 1.5 is out of range; allowed: less than or equal to 1"),
        ("duplex: 0.75", "duplex: 0", "link.duplex: 0 is out of range; allowed: greater than 0"),
        ("  duplex: 0.75\n", "", "link.duplex: is missing"),
        ("node_size: 4", "node_size: 0", "collectives.node_size: 0 is out of range"),
        ("op_seconds: 1.0e-6", "op_seconds: 4", "op_seconds: 4 is out of range; allowed: less than or equal to 0.01"),
        ("op_seconds: 1.0e-6", "op_seconds: -1.0e-6", "op_seconds: -1e-06 is out of range"),
        ("op_seconds: 1.0e-6\n", "", "op_seconds: is missing"),
        ("matmul: {low: 0.4, nominal: 0.5, high: 0.8}", "matmul: {low: 0.4, nominal: 0.3, high: 0.8}",
         "efficiency.matmul.nominal: 0.3 is out of range; allowed: at least 0.4"),
        ("matmul: {low: 0.4, nominal: 0.5, high: 0.8}", "matmul: {low: 0.6, nominal: 0.7, high: 0.65}",
         "efficiency.matmul.high: 0.65 is out of range; allowed: at least 0.7"),
        ("high: 0.5}", "high: 1.01}", "efficiency.attention.high: 1.01 is out of range"),
        ("{low: 0.2,", "{low: 0,", "efficiency.attention.low: 0 is out of range"),
        ("  memory: {low: 0.7, nominal: 0.8, high: 0.9}\n", "", "efficiency.memory: is missing"),
        ("  memory: {low: 0.7", "  memorry: {low: 0.7", "did you mean 'memory'"),
        ("name: round", "name: ''", "name: '' is text"),
        ("name: round", "nam: round", "did you mean 'name'"),
        ("name: round", "name: round\nmeasured: 1", "measured: 1 is a whole number"),
        ("name: round", "name: round\nmeasured_ops: {'mm(2x2 float32)': -1.0}", "mm(2x2 float32)"),
        ("name: round", "name: round\nmeasured_ops: [1.0]", "measured_ops: [1.0] is a list"),
        ("name: round", "name: round\nreplay_seconds: 12.0", "replay_seconds: 12 is out of range"),
        ("name: round", "name: round\ncopy_slowdown: -0.1", "copy_slowdown: -0.1 is out of range"),
        ("name: round", "name: round\nname: other", "name: is given twice"),
        ("name: round", "name: !!python/object:os.system x", "has the tag"),
        ("name: round", "name: [", "broken syntax"),
        ("actmem_hardware: 1", "actmem_hardware: 2", "is no hardware profile"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_refused_in_words(text: str, before: str, after: str, expected: str) -> None:
    assert before in text
    found = faults_of(text.replace(before, after, 1))
    assert any(expected in fault for fault in found), found


def test_all_faults_are_told_at_once_with_their_lines(text: str) -> None:
    bad = text.replace("100.0e12", "-1").replace("duplex: 0.75", "duplex: 3").replace("high: 0.5}", "high: 7}")
    assert [fault.split(":")[0] for fault in faults_of(bad)] == [
        "line 3, matmul_flops_per_second",
        "line 10, link.duplex",
        "line 15, efficiency.attention.high",
    ]


@pytest.mark.parametrize("content", ["", "[]", "text", "a: b"])
def test_other_files_are_no_profiles(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(content)
    with pytest.raises(HardwareError, match="is no hardware profile"):
        load_hardware(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot be read: No such file"):
        load_hardware(tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(HardwareError, match="is not UTF-8"):
        load_hardware(tmp_path / "binary")
    with pytest.raises(HardwareError, match="Is a directory"):
        load_hardware(tmp_path)


@pytest.mark.parametrize(("named", "nearest"), [("nonsense", None), ("tpu-v5p", None), ("h10", "h100-sxm")])
def test_a_name_that_is_not_known_lists_all_and_only_what_is_near(named: str, nearest: str | None) -> None:
    with pytest.raises(HardwareError) as caught:
        load_hardware(named)
    (fault,) = caught.value.faults
    assert fault.nearest == nearest
    assert fault.allowed is not None and all(name in fault.allowed for name in device_names())


@pytest.mark.parametrize("name", device_names())
def test_saved_profiles_come_back(name: str, tmp_path: Path) -> None:
    ops = {"mm(4x256x768 float32, 2x2 float32)": 1.2345e-05, "add(3 float32)": 0.0}
    device = load_hardware(name).model_copy(update={"measured": True, "measured_ops": ops, "note": "é: [1]"})
    save_hardware(device, tmp_path / "mine.yaml")
    assert load_hardware(tmp_path / "mine.yaml") == device
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    hardware: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    save_hardware(hardware, path)
    before = path.read_text()

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_hardware(hardware.model_copy(update={"name": "other"}), path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.yaml"]
    assert path.read_text() == before


def test_a_folder_that_is_not_there(hardware: Hardware, tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot be written: No such file"):
        save_hardware(hardware, tmp_path / "none" / "mine.yaml")
