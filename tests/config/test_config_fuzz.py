"""Whatever stands in the file or on the command line, the outcome is a configuration or a `ConfigError`."""

from __future__ import annotations

from copy import deepcopy
from io import StringIO
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from actmem.config.loading import parse_config
from actmem.config.schema import RunConfig
from actmem.config.wording import keys_at
from actmem.errors import ConfigError

moderate = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

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


def mutated(changes: list[tuple[tuple[str, ...], object]]) -> dict[str, Any]:
    config = deepcopy(VALID)
    for (*section, key), value in changes:
        inside = config.setdefault(section[0], {}) if section else config
        if isinstance(inside, dict):
            inside[key] = value
    return config


def test_the_configuration_that_is_mutated_is_sound() -> None:
    assert isinstance(outcome(VALID), RunConfig)
