"""`python -m experiments.sweep` with a tiny model: a value, one more, and what is refused."""

import json
import shlex

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def answers(folder, tiny_model_dir, records_file, judge_url, run_program):
    both = (f"--model_path={tiny_model_dir} --judge_url={judge_url} --dtype=float32 "
            "--judge_model=lexical-stand-in --max_response_tokens=12 "
            "--judge_requests_per_minute=100000")
    train = (f"--train_file={records_file} --num_prompts=2 --group_size=2 --mini_batch_size=4 "
             "--num_steps=1 --learning_rate=1e-2")
    evaluate = f"--eval_file={records_file} --num_seeds=2"

    def flags(name, values, *switches, vary="eta", train=train, **others):
        options = {"sweep_dir": folder / name, "vary": vary, "values": values, "both": both,
                   "train": train, "evaluate": evaluate} | others
        return [f"--{key}={value}" for key, value in options.items()] + list(switches)

    cases = {
        "commands": flags("dry", "0;0.5", "--dry_run"),
        "together": flags("dry", "token,absolute;token,ordered", "--dry_run",
                          vary="granularity,mode"),
        "nine": flags("dry", "0.1,0,0,0,0,0,0,0,0.9;1", "--dry_run", "--best"),
        "bad value": flags("bad", "7;0"),
        "first": flags("whole", "0"),
        "more": flags("whole", "1;0"),
        "other": flags("whole", "ordered", vary="mode"),
        "parts": flags("x", "token;token,ordered", vary="granularity,mode"),
        "twice": flags("x", "0;1;0"),
        "empty": flags("x", "0;;1"),
        "shared folder": flags("x", "a b;a_b", vary="mode"),
        "set twice": flags("x", "0;1", train=f"{train} --eta=1"),
        "run_dir": flags("x", "0;1", evaluate="--run_dir=y"),
        "quotes": flags("x", "0;1", both="'"),
    }
    return dict(zip(cases, run_program("experiments.sweep", *cases.values()), strict=True))


def printed(answer):
    return [shlex.split(line)[2:] for line in answer["out"].splitlines()]


def test_a_dry_run_prints_the_commands(answers, folder):
    assert answers["commands"]["status"] == 0, answers["commands"]["err"]
    lines = printed(answers["commands"])
    assert [line[0] for line in lines] == ["experiments.train_rl", "experiments.evaluate"] * 2
    assert lines[2][-2:] == ["--eta=0.5", f"--run_dir={folder}/dry/eta_0.5/train"]
    assert lines[3][-2:] == [f"--checkpoint={folder}/dry/eta_0.5/train",
                             f"--run_dir={folder}/dry/eta_0.5/evaluation"]
    assert "--num_seeds=2" in lines[3] and "--num_seeds=2" not in lines[2]
    assert "--judge_model=lexical-stand-in" in lines[2] and (
        "--judge_model=lexical-stand-in" in lines[3])
    assert not (folder / "dry").exists()


def test_several_flags_vary_together_and_a_value_may_be_a_list(answers, folder):
    together = printed(answers["together"])
    assert together[0][-3:-1] == ["--granularity=token", "--mode=absolute"]
    assert together[2][-3:] == ["--granularity=token", "--mode=ordered",
                                f"--run_dir={folder}/dry/granularity_token_mode_ordered/train"]
    nine = printed(answers["nine"])
    assert nine[0][-2] == "--eta=0.1,0,0,0,0,0,0,0,0.9" and nine[2][-2] == "--eta=1"
    assert nine[3][-2] == f"--checkpoint={folder}/dry/eta_1/train/best"


def test_a_bad_value_is_found_before_anything_is_trained(answers, folder):
    assert answers["bad value"]["status"] == 2
    assert "ended with status 2" in answers["bad value"]["err"]
    assert "--eta=7" in answers["bad value"]["err"]
    assert not list((folder / "bad").glob("*/train/config.json"))


def test_every_value_is_trained_evaluated_and_shown(answers, folder):
    assert answers["first"]["status"] == answers["more"]["status"] == 0, answers["first"]["err"]
    shown = json.loads((folder / "whole" / "sweep.json").read_text())
    assert [point["value"] for point in shown["points"]] == ["1", "0"]
    for point in shown["points"]:
        results = json.loads(
            (folder / "whole" / f"eta_{point['value']}" / "evaluation" / "results.json")
            .read_text())
        assert point["mean"] == results["overall"]["mean"]
        assert point["std"] == results["overall"]["std"]
        assert results["checkpoint"]["step"] == 1
        line = next(line for line in answers["more"]["out"].splitlines()
                    if line.split() and line.split()[0] == point["value"])
        assert f"{point['mean']['SCS']:.2f} ±{point['std']['SCS']:.2f}" in line
        config = json.loads((folder / "whole" / f"eta_{point['value']}" / "train" / "config.json")
                            .read_text())
        assert config["eta"] == [point["value"]]
    assert (folder / "whole" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "NO REAL JUDGMENTS" in shown["note"]


def test_what_is_done_is_not_done_again(answers):
    assert "[1/1] eta = 0\n" in answers["first"]["out"]
    assert "[1/1] eta = 1\n" in answers["more"]["out"]


@pytest.mark.parametrize("case, message", [
    ("other", "--vary: ['eta'] there, ['mode'] now"),
    ("parts", "'token' is not one value for each of --vary=granularity,mode"),
    ("twice", "'0' is given twice"),
    ("empty", "'' is not one value for each"),
    ("shared folder", "two would share the folder 'mode_a_b'"),
    ("set twice", "--train: the sweep itself sets --eta"),
    ("run_dir", "--evaluate: the sweep itself sets --run_dir"),
    ("quotes", "--both: No closing quotation"),
])
def test_mistakes_are_refused(answers, case, message):
    assert answers[case]["status"] == 2
    assert answers[case]["err"].startswith("error: ") and message in answers[case]["err"]
