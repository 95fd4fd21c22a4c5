"""Shared n-grams are found wherever training text is kept, and only those."""

import gzip
import json
import random
import shutil
import tarfile

import pytest
from eval_cases import Scripted, mmlu_pro_folder, write_jsonl

from earlyfusion.eval.benchmarks.mmlu_pro import MmluPro
from earlyfusion.eval.contamination import find_overlap, training_texts
from earlyfusion.eval.harness import run_task
from earlyfusion.eval.protocol import EvalError, Question, TaskOptions
from earlyfusion.pipeline import cli


def words(rng, count):
    return " ".join("".join(rng.choice("abcdefgh") for _ in range(4)) for _ in range(count))


@pytest.mark.parametrize("seed", [0, 1])
def test_shares_are_those_of_a_plain_comparison_of_word_tuples(seed):
    rng = random.Random(seed)
    texts = [words(rng, rng.choice((5, 10, 30, 60))) for _ in range(40)]
    questions = [Question(str(i), text, None) for i, text in enumerate(texts)]
    documents = []
    for text in texts[::3]:
        cut = text.split()
        a = rng.randrange(len(cut))
        documents.append(("x", f"{words(rng, 20)}, {' '.join(cut[a : a + 20]).upper()}! {words(rng, 5)}"))
    shares, looked = find_overlap(questions, documents)
    short = 0
    for question, text in zip(questions, texts):
        own = text.split()
        if len(own) < 8:
            assert question.id not in shares
            short += 1
            continue
        k = min(13, len(own))
        seen = set()
        for _, document in documents:
            flat = document.lower().replace(",", " ").replace("!", " ").split()
            seen |= {tuple(flat[i : i + k]) for i in range(len(flat) - k + 1)}
        mine = {tuple(own[i : i + k]) for i in range(len(own) - k + 1)}
        assert shares[question.id] == pytest.approx(len(mine & seen) / len(mine))
    assert looked["too_short"] == short and 0 < sum(map(bool, shares.values())) < len(shares)


def test_text_is_found_in_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("mark1")
    write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"content": "mark2"}]}])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "mark3"}\n'))
    (tmp_path / "d.json").write_text('{"x": [1, {"y": "mark4"}]}')
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "1.txt").write_text("mark5")
    (tmp_path / "shard" / "1.jpg").write_text("picture")
    with tarfile.open(tmp_path / "shard-000.tar", "w") as tar:
        tar.add(tmp_path / "shard", "s")
    shutil.rmtree(tmp_path / "shard")
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"text": ["mark6"], "n": [1]}), str(tmp_path / "e.parquet"))
    found = " ".join(text for _, text in training_texts(tmp_path))
    assert all(f"mark{n}" in found for n in range(1, 7)) and "picture" not in found
    with pytest.raises(EvalError, match="no such"):
        list(training_texts(tmp_path / "none"))


def test_the_verb_reports_the_question_that_leaked_and_the_score_without_it(tmp_path, capsys):
    folder = mmlu_pro_folder(tmp_path / "data")
    made, shards, out = MmluPro(TaskOptions(data=folder)), tmp_path / "train", tmp_path / "out"
    (row,) = [q.meta["row"] for q in made.questions() if q.id == "101"]
    seen = f"seen: {row['question']} {' '.join(row['options'])}"
    write_jsonl(shards / "web.jsonl", [{"text": "nothing"}, {"text": seen}])
    letter = lambda r: "B" if "number 1 of computer" in r.prompt else "J"
    run_task(Scripted(say=lambda r: f"The answer is ({letter(r)})."), made, out=out)
    capsys.readouterr()
    words = ["--contamination", shards, "--tasks", "mmlu_pro", "--data", folder, "--out", out]
    assert cli.main(["eval", *map(str, words)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 8 questions" in shown and "score 0.1250 on all, 0.0000" in shown
    told = json.loads((out / "mmlu_pro" / "contamination.json").read_text())
    assert told["shares"] == {"101": 1.0} and told["files"]["web.jsonl"] > 0
