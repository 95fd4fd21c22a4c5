"""Measuring on held-out problems: probabilities against a naive forward, answers against the engine,
estimators against enumeration, files and the verb."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusion_cases import tiny_config, tiny_model, tiny_tokenizer
from rl_cases import ending, problem_of
from tool_cases import TOKENIZER as CHAT

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.encode import encode
from earlyfusion.data.sample import Sample
from earlyfusion.data.tasks.problem import Task
from earlyfusion.data.tasks.registry import make_task
from earlyfusion.eval import measure as m
from earlyfusion.eval import measured as numbers
from earlyfusion.eval.measured import load_measured, paired, write_measured
from earlyfusion.model.engine.engine import evaluating, pack_prompts
from earlyfusion.model.hub.folder import save_model
from earlyfusion.pipeline import cli
from earlyfusion.rl.recipe import entry_of
from earlyfusion.rl.rollouts.prompts import encode_prompt

TOKENIZER = tiny_tokenizer()
CLOSE = 2e-5  # nats, fp32: another batch and another kernel of the same sums
ENTRIES = [entry_of(label) for label in ("counting/1/picture", "counting/1/twin", "relation/0/twin")]


def model(seed: int = 0):
    return tiny_model(tiny_config(TOKENIZER), seed)


def by_hand(net, prompt, ids, temperature=1.0, start=0):
    """(probability of ids[start:], mean entropy) after the prompt, by one forward of this document alone."""
    whole = replace(prompt, ids=torch.cat([prompt.ids, torch.tensor(ids)]))
    with evaluating(net):
        hidden = net.hidden(pack_prompts(net, [whole]))
        logs = (net.logits(hidden[len(prompt) - 1 : -1]).double() / temperature).log_softmax(-1)
    p = logs.gather(1, torch.tensor(ids)[:, None])[start:].sum().exp()
    return float(p), float(-(logs.exp() * logs).sum(-1).mean())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_probabilities_and_entropies_are_those_of_a_naive_forward(seed, temperature):
    net = model(seed)
    asked = m.ask(net, TOKENIZER, ENTRIES, problems=3, seed=seed, max_new_tokens=5)
    for question, done, one in zip(asked.questions, asked.greedy, asked.measured(temperature)):
        p, _ = by_hand(net, question.prompt, question.target, temperature)
        sure, entropy = by_hand(net, question.prompt, done.ids, temperature)
        assert (one.p_target, one.confidence) == pytest.approx((p, sure), rel=1e-3)
        assert one.entropy == pytest.approx(entropy, abs=CLOSE)
        assert question.target[-1] == TOKENIZER.eos_id
        assert TOKENIZER.decode(question.target[:-1]) == f" {question.problem.target}"
    # The prompt is that of training.
    sample = Sample(list(asked.questions[0].problem.prompt("picture")), "s", "0")
    prompt = encode(sample, TOKENIZER, net.config.vision, eos=False)
    own = asked.questions[0].prompt
    assert torch.equal(prompt.ids, own.ids) and torch.equal(prompt.patches, own.patches)


@pytest.mark.parametrize("seed", [0, 1])
def test_answers_and_samples_do_not_depend_on_the_size_of_the_chunks(seed):
    net = model(seed)
    how = {"problems": 4, "seed": seed, "samples": 3, "max_new_tokens": 6, "temperature": 0.9}
    asked, small = (m.ask(net, TOKENIZER, ENTRIES, **how, slots=slots) for slots in (128, 5))
    drawn = [tuple(one.ids) for group in asked.samples for one in group]
    assert drawn == [tuple(one.ids) for group in small.samples for one in group] and len(set(drawn)) > 10
    for one, other in zip(asked.measured(), small.measured()):
        assert one.answer == other.answer and one.sampled == other.sampled
        assert one.p_target == pytest.approx(other.p_target, rel=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_answer_that_the_limit_cut_off_is_none_and_four_times_the_limit_shows_how_it_goes_on(
    monkeypatch, seed
):
    monkeypatch.setattr(Task, "reward", lambda task, problem, text: float(bool(text)))
    net = ending(model(seed), logit=2.0)
    asked = m.ask(net, TOKENIZER, ENTRIES, problems=25, seed=seed, samples=2, max_new_tokens=6)
    kinds, ends = set(), {TOKENIZER.eos_id, TOKENIZER.special_ids["<|end_of_msg|>"]}
    for question, at_limit, longer, drawn, one in zip(
        asked.questions, asked.greedy, asked.longer, asked.samples, asked.measured()
    ):
        assert longer.ids[: question.budget] == at_limit.ids and len(longer.ids) <= 4 * question.budget
        for done, ended in ((at_limit, one.ended), (longer, one.ended_4x)):
            assert ended == (done.ids[-1] in ends), "nothing else ends an answer"
        assert one.score == float(one.ended and bool(at_limit.text))
        assert one.solved_4x == (one.ended_4x and bool(longer.text))
        assert list(one.sampled) == [float(s.ids[-1] in ends and bool(s.text)) for s in drawn]
        kinds.add((one.ended, one.ended_4x))
    assert kinds >= {(True, True), (False, False)} or kinds >= {(True, True), (False, True)}


def test_pictures_are_replaced_and_questions_stay():
    """Grey and swapped pictures keep the tokens of the prompt; what is told in words has nothing to
    replace."""
    net, entry = model(), ENTRIES[0]
    ways = ("true", "grey", "swapped", "none")
    asked = m.ask(net, TOKENIZER, ENTRIES[:2], problems=6, seed=3, pictures=ways)
    labels = [entry.label, *(f"{entry.label}/{how}" for how in ways[1:]), ENTRIES[1].label]
    assert list(numbers.summary(asked.measured())) == labels
    prompts = [question.prompt for question in asked.questions]
    true, grey, swapped, none = (prompts[6 * i : 6 * i + 6] for i in range(4))
    for i, (own, blank, missing) in enumerate(zip(true, grey, none)):
        assert torch.equal(own.ids, blank.ids) and own.grids == blank.grids
        assert not torch.equal(own.patches, blank.patches)
        assert set(blank.patches.unique().tolist()) <= {0, 128}
        assert torch.equal(swapped[i].patches, true[(i + 1) % 6].patches)
        assert not len(missing.grids) and len(missing) < len(own)
    given = (asked.questions[0].problem, entry_of("counting/1/picture/tools"), CHAT, net.config.vision)
    assert len(encode_prompt(*given).grids) == 1 and not len(encode_prompt(*given, ()).grids)


def test_the_problems_are_held_out_and_the_same_for_every_model_and_form():
    net = model(0).train()
    before = {name: p.clone() for name, p in net.named_parameters()}
    first, other = (
        m.ask(net, TOKENIZER, ENTRIES, problems=6, seed=seed, samples=1).measured() for seed in (3, 4)
    )
    assert net.training and all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert all(p.grad is None for p in net.parameters())
    second = m.ask(model(1), TOKENIZER, ENTRIES, problems=6, seed=3).measured()
    told = [[(one.label, one.key, one.target) for one in part] for part in (first, second)]
    assert told[0] == told[1] and not {one.key for one in first} & {one.key for one in other}
    assert [one.p_target for one in first] != [one.p_target for one in second]
    # arithmetic at level 0 has few held-out sums: fewer problems, each once.
    drawn = make_task("arithmetic").test_problems(200, 0)
    assert 3 <= len(drawn) == len({problem.question + problem.description for problem in drawn}) < 30
    pictures, twins, _ = numbers.by_problem(first).values()
    assert list(pictures) == list(twins) and len(pictures) == 6
    assert all("/test/" in one.key for one in first)
    assert all(one.picture is not None for one in pictures.values())
    assert all(one.picture is None for one in twins.values())


@pytest.mark.parametrize("thinks", ["red square, blue circle", "one"])
def test_an_answer_after_a_thought_is_scored_given_that_thought(thinks):
    net = model()
    entry = entry_of("counting/1/twin/thought")
    question = m.questions_of(entry, TOKENIZER, net, 1, 0, 4)[0]
    assert question.budget > 20
    text = f" {thinks}; answer: 9"
    answer = m.Answer([*TOKENIZER.encode(text), TOKENIZER.eos_id], text)
    mark = m._mark(question, answer, TOKENIZER)
    assert TOKENIZER.decode(answer.ids[:mark]).endswith("answer:")
    asked = m.Asked(net, [question], [answer], [answer], [[]], [mark])
    m._keep_states(m.engine_for(net, TOKENIZER, [question.prompt], 200), asked)
    expected, _ = by_hand(net, question.prompt, [*answer.ids[:mark], *question.target], start=mark)
    assert asked.measured()[0].p_target == pytest.approx(expected, rel=1e-3)
    assert m._mark(question, m.Answer(answer.ids, " nothing said"), TOKENIZER) is None


@pytest.mark.parametrize("samples,correct,k", [(8, 3, 1), (8, 3, 4), (6, 0, 3), (6, 6, 2), (7, 5, 3)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_one(samples, correct, k):
    subsets = list(itertools.combinations(range(samples), k))
    share = np.mean([any(i < correct for i in subset) for subset in subsets])
    assert numbers.pass_at_k(samples, correct, k) == pytest.approx(share)


def test_ece_of_known_cases():
    assert numbers.ece([0.9] * 10, [True] * 9 + [False], bins=1) == pytest.approx(0.0)
    assert numbers.ece([0.9] * 10, [True] * 4 + [False] * 6, bins=1) == pytest.approx(0.5)
    sure, right = [0.2] * 5 + [0.8] * 5, [True] * 5 + [False] * 5  # one bin hides what two show
    assert numbers.ece(sure, right, bins=1) == pytest.approx(0.0)
    assert numbers.ece(sure, right, bins=2) == pytest.approx(0.8)
    rng = np.random.default_rng(0)
    p = rng.random(20_000)
    assert numbers.ece(p, rng.random(20_000) < p) < 0.02  # calibrated by construction


def test_entropy_matching_finds_the_temperature_back_or_says_that_it_is_out_of_reach():
    asked = m.ask(model(), TOKENIZER, ENTRIES[1:2], problems=6, seed=0)
    for temperature in (0.4, 1.0, 2.5):
        wanted, there = asked.entropy(temperature), asked.measured(temperature)
        found = m.match_entropy(asked, wanted)
        assert found.reached and found.temperature == pytest.approx(temperature, rel=2e-2)
        assert found.entropy == pytest.approx(wanted, abs=2e-4)
        assert np.mean([one.p_target for one in found.measured]) == pytest.approx(
            np.mean([one.p_target for one in there]), rel=2e-2
        )
        assert [one.answer for one in found.measured] == [one.answer for one in there]
    assert not m.match_entropy(asked, 100.0).reached
    with pytest.raises(DataError, match="nats"):
        m.match_entropy(asked, math.nan)
    with pytest.raises(DataError, match="known"):
        asked.only("maze/0/picture")


def test_files_keep_everything_but_the_picture_which_is_drawn_again(tmp_path):
    measured = m.ask(model(), TOKENIZER, ENTRIES, problems=3, seed=0, samples=2).measured()
    file = write_measured(tmp_path / "a" / "measured.jsonl", measured)
    assert load_measured(file) == [replace(one, picture=None) for one in measured]
    for one in measured[:3]:
        assert problem_of(one.key).picture.tobytes() == one.picture.tobytes()
    older = json.loads(file.read_text().splitlines()[0])
    del older["ended"]
    for text, said in (("{}", "line 1"), (json.dumps(older), "judged by their beginning")):
        file.write_text(text)
        with pytest.raises(DataError, match=said):
            load_measured(file)
    with pytest.raises(DataError, match="no such file"):
        load_measured(tmp_path / "b.jsonl")


def test_labels_are_read_back_and_wrong_ones_refused():
    for label in (
        "counting",
        "counting/2/twin",
        "maze/1/picture/thought",
        "relation/thought",
        "counting/tools",
    ):
        entry = entry_of(label)
        assert entry_of(entry.label) == entry
    for label in ("countin", "counting/x", "counting/1/word", "counting/1/twin/picture", "tools", ""):
        with pytest.raises(DataError):
            entry_of(label)


def test_paired_rows_see_a_planted_difference_and_nothing_else():
    def rows_of(before, after):
        return {(row["label"], row["metric"]): row for row in paired(before, after)}

    picture, twin = "counting/1/picture", "counting/1/twin"
    before = m.ask(model(), TOKENIZER, ENTRIES, problems=40, seed=0).measured()
    after = [
        replace(one, solved=True, score=1.0) if one.label == picture and i % 40 < 30 else one
        for i, one in enumerate(before)
    ]
    rows = rows_of(before, after)
    assert rows[picture, "accuracy"]["clear"] and rows[picture, "accuracy"]["after"] >= 0.75
    assert not rows[twin, "accuracy"]["clear"] and rows[twin, "accuracy"]["p_holm"] == 1.0
    assert (picture, "pass@1") not in rows, "no samples were drawn"
    drawn = [[replace(one, sampled=(1.0, x, 0.0, 0.0)) for one in before] for x in (0.0, 1.0)]
    row = rows_of(*drawn)[picture, "pass@1"]
    assert (row["before"], row["after"], row["value"]) == (0.25, 0.5, 0.25)
    assert (picture, "pass@1") not in rows_of(before, drawn[0]), "only one side drew"
    with pytest.raises(DataError, match="share no problem"):
        paired(before, [replace(one, key=one.key + "x") for one in after])


def test_the_verb_writes_compares_and_names_mistakes(tmp_path, capsys):
    save_model(model(), TOKENIZER, tmp_path / "model")
    out = tmp_path / "out"

    def main(words):
        return cli.main(f"measure --model {tmp_path}/model --problems 5 --device cpu --tasks {words}".split())

    tasks = "counting/1/twin relation"
    assert main(f"{tasks} --samples 2 --match-entropy 1.5 --out {out}") == 0
    told = json.loads((out / "summary.json").read_text())
    assert set(told["tasks"]) == set(told["matched"]) == {"counting/1/twin", "relation/0/picture"}
    assert told["matched"]["counting/1/twin"]["entropy"] == pytest.approx(1.5, abs=1e-3)
    measured = load_measured(out / "measured.jsonl")
    assert told["tasks"] == json.loads(json.dumps(numbers.summary(measured)))
    assert main(f"{tasks} --against {out}/measured.jsonl --out {out}/b") == 0
    rows = json.loads((out / "b" / "summary.json").read_text())["against"]["rows"]
    assert len(rows) == 8 and all(row["value"] == 0 and not row["clear"] for row in rows)
    for words, said in (
        ("counting --pictures true,gray", "did you mean 'grey'"),
        ("countin", "did you mean 'counting'"),
        ("counting counting/0", "twice"),
        ("counting --max-new-tokens 0", "greater than 0"),
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert said in capsys.readouterr().err
