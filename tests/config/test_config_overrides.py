"""Settings from the command line, laid over a file."""

from __future__ import annotations

import pytest

from actmem.config.loading import parse_config
from actmem.errors import ConfigError, Fault

TEXT = "model: {name: qwen3-tiny}\ndata: {path: [a]}\ntrain: {steps: 30, lr: x}\n"
SOUND = TEXT.replace(", lr: x", "")


def only_fault(*overrides: str, text: str = SOUND) -> Fault:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.yaml", overrides)
    (fault,) = caught.value.faults
    return fault


def test_values_are_read_as_yaml_and_the_last_one_counts() -> None:
    overrides = ["train.steps=20", "train.steps=25", "data.path=[b, c]", "policy=full", "train.grad_clip=null"]
    config = parse_config(SOUND, overrides=[*overrides, "memory.verify=off", "model.config.hidden_size=64"])
    assert (config.train.steps, config.train.grad_clip, config.data.path) == (25, None, ["b", "c"])
    assert (config.policy, config.memory.verify, config.model.config) == ("full", "off", {"hidden_size": 64})


def test_a_mapping_that_is_overridden_stays_as_it_was() -> None:
    mapping: dict[str, object] = {"model": {"name": "qwen3-tiny"}, "data": {"path": ["a"]}, "train": {"steps": 30}}
    assert parse_config(mapping, overrides=["train.steps=20"]).train.steps == 20
    assert mapping["train"] == {"steps": 30}


def test_a_whole_section_can_be_given() -> None:
    assert parse_config(TEXT, overrides=["train={steps: 20}"]).train.steps == 20


def test_an_override_mends_a_fault_of_the_file() -> None:
    assert only_fault(text=TEXT).line == 3
    assert parse_config(TEXT, overrides=["train.lr=1e-4"]).train.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "path", "problem"),
    [
        ("train.steps=x", "train.steps", "'x' is text"),
        ("train.stepz=3", "train.stepz", "is not a key of train"),
        ("tran.steps=3", "tran", "is not a key of the top level"),
        ("train.steps=", "train.steps", "has no value after '='"),
        (
            "data.path=[",
            "data.path",
            "broken syntax: while parsing a flow node, expected the node content, but found the end",
        ),
        ("train.lr=!odd 3", "train.lr", "has the tag '!odd'"),
        ("train={lr: !odd 3}", "train.lr", "has the tag '!odd'"),
        ("train={steps: 3, warmup_steps: 1, steps: 3}", "train.steps", "is given twice"),
        ("data.path=[!odd 3]", "data.path[0]", "has the tag '!odd'"),
        ("model.name.x=3", "model.name.x", "cannot be set, because model.name is text, not a section"),
        ("model.name.x.y=3", "model.name.x.y", "cannot be set, because model.name is text, not a section"),
        ("train.steps", "'train.steps'", "is not an override"),
        ("=3", "'=3'", "is not an override"),
        ("train..steps=3", "'train..steps=3'", "is not an override"),
    ],
)
def test_faults_in_overrides_have_a_path_and_no_line(override: str, path: str, problem: str) -> None:
    fault = only_fault(override)
    assert (fault.path, fault.problem, fault.line, fault.column) == (path, problem, None, None)


def test_an_unknown_key_is_told_its_nearest() -> None:
    assert only_fault("train.stepz=3").nearest == "steps"
    assert only_fault("tran.steps=3").nearest == "train"


def test_faults_of_file_and_overrides_come_together_the_file_first() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(TEXT, overrides=["oops", "train.seed=-1"])
    assert [fault.path for fault in caught.value.faults] == ["train.lr", "'oops'", "train.seed"]


def test_a_broken_file_does_not_hide_a_broken_override() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("a: [", overrides=["oops", "train.seed=1"])
    assert [fault.path for fault in caught.value.faults] == ["YAML", "'oops'"]
