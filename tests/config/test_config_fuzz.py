"""Whatever stands in the file or on the command line, the outcome is a configuration or a `ConfigError`."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from io import StringIO
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from actmem.config.layers import from_ranges, to_ranges
from actmem.config.loading import parse_config
from actmem.config.patterns import pattern_problem
from actmem.config.presets import PRESETS
from actmem.config.schema import ParallelConfig, RunConfig
from actmem.config.sizes import num_layers
from actmem.config.stages import layers_of_stages, num_stages, stages_of_rank
from actmem.config.wording import keys_at, names_at
from actmem.errors import ConfigError
from actmem.planning import Plan
from actmem.planning.sections import plan_of

# ACTMEM_FUZZ=10 runs ten times as many.
SCALE = int(os.environ.get("ACTMEM_FUZZ", "1"))
moderate = settings(max_examples=150 * SCALE, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=300 * SCALE, deadline=None, suppress_health_check=[HealthCheck.too_slow])

VALID: dict[str, Any] = {
    "model": {"name": "qwen3-tiny", "config": {"hidden_size": 64}},
    "data": {"path": ["a", "b"], "vocab_size": 300},
    "train": {"steps": 10, "lr": 0.1, "betas": [0.9, 0.95], "grad_clip": None, "resume": True},
    "policy": "full",
    "memory": {"verify": "off"},
}
PLACES = [(name,) for name in keys_at(())] + [(name, key) for name in keys_at(()) for key in keys_at((name,))]

SYNTAX = r"""model data train lr steps path : - ? , [ ] { } & * ! !! | > ' " % @ ` # --- ... ~ null true .inf .nan 1e999
0x << &a *a !!int !!set !!binary %YAML %TAG 1.1 9.9 \ \U \ud800 -_ 0o9 = é"""
fragments = st.sampled_from([*SYNTAX.split(), *"\t\n\0\x85\ufeff\u2028\ud800"])
yaml_like = st.lists(st.one_of(fragments, st.text(max_size=3), st.sampled_from([" ", "\n", "\n  "])), max_size=25).map(
    "".join
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["\ud800"]),
    st.text(max_size=8),
    st.binary(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "\ud800", 3]), inner, max_size=3)
    ),
    max_leaves=6,
)
changed = st.lists(st.tuples(st.sampled_from(PLACES), values), min_size=1, max_size=4)


def outcome(config: Any, overrides: list[str] | None = None) -> RunConfig | ConfigError:
    try:
        return parse_config(config, "fuzz.yaml", overrides or [])
    except ConfigError as error:
        assert error.faults
        assert str(error).encode("utf-8")
        assert "pydantic" not in str(error)
        return error


@moderate
@given(yaml_like | st.text(max_size=60))
@example("a: [*a, &a ]")
@example("? ? ? : : :")
@example("%YAML 1.1\n---\n- 1:60\n")
@example("&a : *a")
@example("!!map [a]")
@example("!!seq {a: b}")
@example("!!bool maybe")
@example("- !!null x")
def test_any_text(text: str) -> None:
    outcome(text)


@moderate
@given(st.text(max_size=12) | yaml_like, yaml_like)
def test_any_override(key: str, value: str) -> None:
    outcome(VALID, [f"{key}={value}", key, f"train.{key}={value}"])


@moderate
@given(changed)
def test_mutated_configurations_from_python(changes: list[tuple[tuple[str, ...], object]]) -> None:
    outcome(mutated(changes))


@moderate
@given(changed)
def test_mutated_configurations_as_yaml(changes: list[tuple[tuple[str, ...], object]]) -> None:
    text = StringIO()
    try:
        YAML(typ="safe", pure=True).dump(mutated(changes), text)
    except UnicodeEncodeError:
        return  # half a surrogate pair cannot be written down
    outcome(text.getvalue())


def mutated(changes: list[tuple[tuple[str, ...], object]], base: dict[str, Any] = VALID) -> dict[str, Any]:
    config = deepcopy(base)
    for (*section, key), value in changes:
        inside = config.setdefault(section[0], {}) if section else config
        if isinstance(inside, dict):
            inside[key] = value
    return config


LAYOUT: dict[str, Any] = {
    "model": {"name": "qwen3-tiny", "config": {"tie_word_embeddings": False}},
    "data": {"path": ["a"]},
    "train": {"micro_batch_size": 4},
    "parallel": {"dp_shard_size": 2, "tp_size": 2, "pp_size": 2, "pp_microbatches": 2, "pp_layers": [1, 3]},
}
sizes = st.one_of(st.integers(-1, 9), st.sampled_from([2**63, 10**30, 10**5000]), scalars)
fields_of_model = st.dictionaries(
    st.sampled_from([*PRESETS["qwen3-moe-tiny"], "num_local_experts", "num_experts"]),
    st.one_of(sizes, st.sampled_from(["qwen3", "qwen3_moe"])),
    max_size=4,
)
model_names = st.sampled_from(["qwen3-tiny", "qwen3-moe-tiny", None])
SPECIAL = {
    "pp_schedule": st.one_of(st.sampled_from(names_at(("parallel", "pp_schedule"))), scalars),
    "pp_layers": st.one_of(st.lists(sizes, max_size=5), values),
    "sequence_parallel": st.one_of(st.booleans(), values),
    "loss_parallel": st.one_of(st.booleans(), values),
}
layout_places = [("parallel", key) for key in keys_at(("parallel",))]
layout_places += [("train", "micro_batch_size"), ("train", "grad_accumulation"), ("data", "sequence_length")]
in_layout = st.sampled_from(layout_places).flatmap(
    lambda place: st.tuples(st.just(place), SPECIAL.get(place[1], sizes))
)
in_model = st.one_of(
    st.tuples(st.just(("model", "config")), fields_of_model), st.tuples(st.just(("model", "name")), model_names)
)
changed_layouts = st.lists(st.one_of(in_layout, in_layout, in_layout, in_model), min_size=1, max_size=6)


@many
@given(changed_layouts)
def test_mutated_layouts(changes: list[tuple[tuple[str, ...], object]]) -> None:
    found = outcome(mutated(changes, LAYOUT))
    if not isinstance(found, RunConfig):
        return
    parallel, depth = found.parallel, num_layers(found.model)
    assert ParallelConfig.model_validate(parallel.model_dump()) == parallel
    if depth is not None and depth < 100:
        assert layers_of_stages(parallel, depth)[-1][1] == depth
        ranks = [stages_of_rank(parallel, rank) for rank in range(parallel.pp_size)]
        assert sorted(stage for stages in ranks for stage in stages) == list(range(num_stages(parallel)))


def test_the_layout_that_is_mutated_is_sound() -> None:
    assert isinstance(outcome(LAYOUT), RunConfig)


WAYS: dict[str, Any] = {
    "model": {"name": "qwen3-tiny"},
    "data": {"path": ["a"]},
    "recompute": {"mode": "select", "select_module": {".*mlp": ["0-1"]}, "full_recompute_layer": [3]},
    "recompute_comm": {"enable": True, "select_module": {".*all_gather": [1]}},
    "swap": {"enable": True, "layer_swap": [{"layers": [2]}], "op_swap": [{"op_name": "self_attn", "layers": [0]}]},
}
SECTIONS = ("recompute", "recompute_comm", "swap", "activation_swap")
numbers = st.integers(-1, 5)
entries = st.one_of(numbers, st.tuples(numbers, numbers).map(lambda pair: f"{pair[0]}-{pair[1]}"), scalars)
layers = st.one_of(st.lists(entries, max_size=4), st.lists(entries, max_size=3).map(tuple), entries, values)
REGEX = [
    ".*",
    "mlp",
    r"\.",
    "(",
    ")",
    "|",
    "[a-z]",
    "?",
    "+",
    "*",
    "{3}",
    "(?i)",
    "(?:",
    "self_attn",
    "mm",
    "$",
    "#1",
    "\\",
]
patterns = st.one_of(st.lists(st.sampled_from(REGEX), max_size=6).map("".join), st.text(max_size=4))
by_pattern = st.one_of(st.dictionaries(patterns, layers, max_size=3), values)
swaps = st.one_of(
    st.lists(st.fixed_dictionaries({}, optional={"layers": layers, "op_name": patterns}), max_size=3), values
)
switches = st.one_of(st.sampled_from(["None", "full", "select", None, True, False, "attention", "none"]), values)
KINDS = {
    "mode": switches,
    "enable": switches,
    "full_recompute_layer": layers,
    "select_module": by_pattern,
    "exclude_op": st.one_of(by_pattern, st.lists(st.text(max_size=4), max_size=3)),
    "default_prefetch": st.one_of(numbers, values),
    "layer_swap": swaps,
    "op_swap": swaps,
}
inside = st.sampled_from([(name, key) for name in SECTIONS for key in keys_at((name,))]).flatmap(
    lambda place: st.tuples(st.just(place), KINDS[place[1]])
)
whole = st.sampled_from([(name,) for name in SECTIONS]).flatmap(lambda place: st.tuples(st.just(place), switches))
changed_ways = st.lists(st.one_of(inside, inside, inside, whole), min_size=1, max_size=5)


@many
@given(changed_ways)
def test_mutated_sections_from_python(changes: list[tuple[tuple[str, ...], object]]) -> None:
    found = outcome(mutated(changes, WAYS))
    if isinstance(found, RunConfig):
        plan = plan_of(found)
        assert isinstance(plan, str | Plan)
        assert RunConfig.model_validate_json(found.model_dump_json()) == found


@moderate
@given(changed_ways)
def test_mutated_sections_as_yaml(changes: list[tuple[tuple[str, ...], object]]) -> None:
    text = StringIO()
    try:
        YAML(typ="safe", pure=True).dump(mutated(changes, WAYS), text)
    except UnicodeEncodeError:
        return  # half a surrogate pair cannot be written down
    found = outcome(text.getvalue())
    if isinstance(found, ConfigError):
        assert all(fault.line is not None for fault in found.faults)


@many
@given(patterns)
def test_any_pattern_is_judged_in_time(pattern: str) -> None:
    started = time.perf_counter()
    pattern_problem(pattern)
    assert time.perf_counter() - started < 5


@many
@given(st.lists(entries, max_size=5))
def test_layers_are_read_or_refused(written: list[object]) -> None:
    try:
        read = from_ranges(written)
    except ValueError:
        return
    assert list(read) == sorted(set(read))
    assert from_ranges(to_ranges(read)) == read


def test_the_sections_that_are_mutated_are_sound() -> None:
    assert isinstance(outcome(WAYS), RunConfig)


def test_the_configuration_that_is_mutated_is_sound() -> None:
    assert isinstance(outcome(VALID), RunConfig)
