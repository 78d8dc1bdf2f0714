"""`actmem check`, and what the `actmem` command does with errors and Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actmem.cli import main
from actmem.errors import DataError

REPOSITORY = Path(__file__).parents[2]
SOUND = "model: {name: qwen3-tiny}\ndata: {path: [a.txt]}\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "run.yaml"
    path.write_text(SOUND)
    return path


def check(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["check", *map(str, arguments)])
    return result.exit_code, result.stdout


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def run_with(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["actmem", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.run()
    return int(ended.value.code or 0)


def test_a_sound_configuration_is_summed_up(config: Path) -> None:
    code, output = check(config, "train.micro_batch_size=4", "policy=full")
    assert code == 0
    assert lines(output)[:6] == [
        f"{config}: no faults",
        "model   qwen3-tiny, float32",
        "data    a.txt",
        "steps   100 of 4 x 1024 = 4096 tokens",
        "plan    policy full",
        "output  runs/actmem",
    ]


@pytest.mark.parametrize(
    ("parallel", "tokens", "words"),
    [
        ("{dp_shard_size: 2}", "2 x 8 x 64 = 1024 tokens in all", "bytes are those of one rank"),
        ("{tp_size: 2, dp_replicate_size: 3}", "3 x 8 x 64 = 1536 tokens in all", "bytes are those of one rank"),
        (
            "{pp_size: 2, pp_microbatches: 4}",
            "8 x 64 = 512 tokens in all",
            "bytes of a layer are those of a rank that runs it, for one of 4 micro-batches",
        ),
    ],
)
def test_the_tokens_of_all_ranks_are_told_and_whose_the_bytes_are(
    config: Path, parallel: str, tokens: str, words: str
) -> None:
    untied = SOUND.replace("qwen3-tiny", "qwen3-tiny, config: {tie_word_embeddings: false}")
    config.write_text(untied + f"parallel: {parallel}\npolicy: full\n")
    code, output = check(config, "train.micro_batch_size=8", "data.sequence_length=64")
    assert code == 0
    assert f"steps   100 of {tokens}" in lines(output)
    assert words in output
    assert ("all layers, those of all stages" in output) == ("pp_size" in parallel)


def test_faults_are_aligned_under_their_file(config: Path) -> None:
    config.write_text(SOUND + "train:\n  steps: '10'\n  stepz: 3\n")
    code, output = check(config, "policy=ful")
    assert code == 2
    shown = lines(output)
    assert shown[:5] == [
        f"{config}: 3 faults",
        "line 4  train.steps  '10' is text",
        "                     allowed: a whole number of at least 1",
        "line 5  train.stepz  is not a key of train",
        "                     allowed: steps, micro_batch_size, grad_accumulation, lr, min_lr_share, warmup_steps, "
        "weight_decay, betas, grad_clip, autocast, seed,",
    ]
    assert shown[-3:] == [
        "        policy       'ful' is not among the allowed names",
        "                     allowed: none, full, mlp, selective, attention-swap, layer-swap, torch-full, torch-sac "
        "or null",
        "                     nearest: full",
    ]


def test_warnings_alone_exit_with_1(config: Path) -> None:
    code, output = check(config, "train.steps=5")
    assert code == 1
    assert lines(output)[0] == f"{config}: no faults, 1 warning"
    assert "train.warmup_steps" in output


def test_faults_as_json(config: Path) -> None:
    config.write_text(SOUND + "train: {lr: .inf}\n")
    code, output = check(config, "--json")
    assert code == 2
    found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["run"] is None
    assert found["warnings"] == []
    assert found["faults"] == [
        {
            "path": "train.lr",
            "problem": "inf is not finite",
            "value": "inf",
            "allowed": "a number above 0",
            "nearest": None,
            "line": 3,
            "column": 9,
        }
    ]


def test_a_sound_configuration_as_json(config: Path) -> None:
    code, output = check(config, "train.steps=20", "--json")
    assert code == 0
    found = json.loads(output)
    assert (found["config"], found["faults"], found["run"]["train"]["steps"]) == (str(config), [], 20)


def test_brackets_are_shown_as_they_are(config: Path) -> None:
    config.write_text(SOUND.replace("qwen3-tiny", "'[/red]'") + "plan: '[bold]x[/bold]'\n'[link=x]': 3\n")
    code, output = check(config)
    assert code == 2
    for text in ("'[/red]' is not", "'[bold]x[/bold]' does not exist", "line 4  [link=x] "):
        assert text in output


def test_a_missing_file_is_a_fault(config: Path) -> None:
    code, output = check(config.parent / "[/b].yaml")
    assert code == 2
    assert "does not exist" in output


def test_an_error_of_a_command_is_shown_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise DataError("the corpus [/red] is empty")

    monkeypatch.setattr("actmem.cli.check.read_config", fail)
    assert run_with(["check", "x.yaml"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: the corpus [/red] is empty\n")


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("actmem.cli.check.read_config", interrupt)
    assert run_with(["check", "x.yaml"], monkeypatch) == 130
    assert capsys.readouterr().err.strip() == "Stopped."
    monkeypatch.setenv("RANK", "1")
    assert run_with(["check", "x.yaml"], monkeypatch) == 130
    assert capsys.readouterr().err.strip() == ""


def test_so_does_what_a_library_makes_of_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module") from error

    monkeypatch.setattr("actmem.cli.check.read_config", interrupt)
    assert run_with(["check", "x.yaml"], monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["check"], ["chekc"], ["check", "x.yaml", "--jsom"], ["[/b]"]])
def test_wrong_usage_exits_with_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(arguments, monkeypatch) == 2
    assert "Usage: actmem" in capsys.readouterr().err


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(main.app, ["--version"])
    assert (result.exit_code, result.stdout.startswith("actmem")) == (0, True)


def test_help_and_faults_import_no_torch(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SOUND + "recompute: {mode: full, full_recompute_layer: [0-9]}\n")
    script = "import sys; from actmem.cli.main import run; run()"
    probe = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {script}"
    for arguments in (["--help"], ["check", str(wrong)]):
        done = subprocess.run(
            [sys.executable, "-c", probe, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.stdout.splitlines()[-1] == "False", arguments


def test_a_name_the_terminal_cannot_encode_is_escaped() -> None:
    script = "from actmem.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", script, "check", "köln.yaml"],
        cwd=REPOSITORY,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert "k\\xf6ln.yaml" in done.stdout or "k\\udcc3\\udcb6ln.yaml" in done.stdout


def test_a_plan_file_is_read_too(config: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("actmem_plan: 1\nrules: [{ops: '(', action: drop}]\n")
    config.write_text(SOUND + "plan: plan.yaml\n")
    code, output = check(config)
    assert code == 2
    shown = lines(output)
    assert shown[0] == f"{config}: 2 faults"
    assert shown[1].startswith("line 2  plan.yaml: rules[0].ops     '(' is not a valid regex: missing )")
    assert shown[2].startswith("line 2  plan.yaml: rules[0].action  'drop'")


def test_faults_of_a_plan_file_hide_no_others_and_are_hidden_by_none(config: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("actmem_plan: 1\n\nrules:\n- {ops: a, action: drop}\n- {action: save}\n")
    in_plan = [("plan.yaml: rules[0].action", 4), ("plan.yaml: rules[1].ops", 5)]
    for text, others in [
        ("train: {steps: x}\nplan: plan.yaml\n", [("train.steps", 3)]),
        ("plan: plan.yaml\nplatform: mindspore\n", [("platform", 4)]),
        ("plan: plan.yaml\nactivation_swap: attention\n", [("activation_swap", 4)]),
        ("plan: plan.yaml\ntrain: {steps: 10, steps: x}\n", [("train.steps", 4), ("train.steps", 4)]),
    ]:
        config.write_text(SOUND + text)
        code, output = check(config, "--json")
        assert code == 2
        assert [(each["path"], each["line"]) for each in json.loads(output)["faults"]] == [*others, *in_plan]
    headless = SOUND.replace("qwen3-tiny}", "qwen3-tiny, config: {num_attention_heads: 0}}")
    config.write_text(headless + "plan: plan.yaml\n")
    found = json.loads(check(config, "--json")[1])["faults"]
    assert [(each["path"], each["line"]) for each in found] == [("model", 1), *in_plan]


def test_another_platform_hides_nothing(config: Path) -> None:
    config.write_text(
        SOUND + "platform: mindspore\nmemory: {strict_matching: true}\n"
        "recompute: {mode: select, select_module: {mpl: [0]}}\n"
    )
    code, output = check(config, "--json")
    paths = [(each["path"], each["line"]) for each in json.loads(output)["faults"]]
    assert (code, paths) == (2, [("platform", 3), ("recompute.select_module['mpl']", 5)])
