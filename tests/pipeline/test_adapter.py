"""LoRA beside frozen weights: step 0 is the model, the base never moves, the merged model computes the same,
peft reads what is written."""

import pytest
import torch
from chat_cases import chat_recipe, tune, write_chats, write_start
from safetensors.torch import load_file
from tiny_run import assert_same, write_recipe
from transformers import AutoModelForImageTextToText, AutoProcessor

from earlyfusion.kernels.errors import UserError
from earlyfusion.pipeline import cli
from earlyfusion.pipeline.adapter import adapted, attach, check_plan, merged
from earlyfusion.pipeline.config.schema import AdapterSection
from earlyfusion.pipeline.errors import EXIT_OK, EXIT_USER
from earlyfusion.pipeline.parallel.mesh import Layout, Sizes
from tests.model.tiny import build, document, gradients, pack, tiny_fusion

pytest.importorskip("peft")
# Frozen parts, too: what a stage freezes must not wake what adapters hold still.
RANK = '--adapter.rank 4 --optim.name adamw --optim.lr 1e-2 --stages.0.frozen ["vision"]'
EVERYTHING = AdapterSection(rank=3, alpha=12.0, targets=["*"])


@pytest.fixture(scope="module")
def model_dir(folder, tokenizer):
    return write_start(folder / "start", tokenizer)


@pytest.fixture(scope="module")
def chat_file(folder, model_dir):
    chats = write_chats(folder / "chats")
    return write_recipe(folder / "chat.toml", chat_recipe(model_dir, chats))


@pytest.fixture(scope="module")
def tuned(folder, chat_file):
    with pytest.MonkeyPatch.context() as patch:
        assert tune(chat_file, folder / "tuned", RANK, "--checkpoint.every 5", monkeypatch=patch) == 0
    return folder / "tuned"


def row():
    config = tiny_fusion()
    return pack([document(30, [(1, 4, 6)], config, 1), document(21, [], config, 2)])


@pytest.mark.parametrize("text", [{}, {"q_lora_rank": 8, "mla_output_gate": True, "attn_res": "block"}])
def test_step_0_is_the_model_and_only_adapters_have_gradients(text):
    model, batch = build(tiny_fusion(**text)), row()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss = model(batch).loss_sum
    attach(model, EVERYTHING)
    assert torch.equal(model(batch).loss_sum, loss)
    model(batch).loss_sum.backward()
    found = gradients(model)
    assert found and all(".lora_" in name for name in found)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == names and len(names) == 2 * len(adapted(model))
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)


@pytest.mark.parametrize("text", [{}, {"q_lora_rank": 8, "mla_output_gate": True, "attn_res": "block"}])
def test_an_adapter_is_the_sum_by_hand_with_its_gradients(text):
    """Every projection, also those that no forward of their own reads: against W + alpha / rank B A written
    into the weights, and the chain rule."""
    torch.manual_seed(0)
    model = attach(build(tiny_fusion(**text)).double(), EVERYTHING)
    for layer in adapted(model).values():
        layer.double()
        torch.nn.init.normal_(layer.lora_B, std=0.3)
    plain = build(tiny_fusion(**text)).double()
    with torch.no_grad():
        for name, layer in adapted(model).items():
            plain.get_parameter(f"{name}.weight").add_(12.0 / 3 * layer.lora_B @ layer.lora_A)
    for each in (model, plain):
        each.train()
        each(row()).loss_sum.backward()
    own, full = gradients(model), gradients(plain)
    for name, layer in adapted(model).items():
        G = full[f"{name}.weight"]
        torch.testing.assert_close(own[f"{name}.lora_B"], 4.0 * G @ layer.lora_A.T, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(own[f"{name}.lora_A"], 4.0 * layer.lora_B.T @ G, atol=1e-9, rtol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(model(row()).nll_T, plain(row()).nll_T, atol=1e-9, rtol=1e-9)
        bare, read = merged(model)
        for name in bare.state_dict():
            torch.testing.assert_close(read(name), plain.state_dict()[name], atol=1e-12, rtol=1e-12)


def test_a_stage_trains_adapters_alone(tuned, model_dir, tmp_path):
    """The base in the checkpoint is the start bit for bit; the model directory is the sum; so is an
    export."""
    assert cli.main(["export", str(tuned), "--to", str(tmp_path / "out")]) == EXIT_OK
    start, last, out = (
        load_file(at / "model.safetensors") for at in (model_dir, tuned / "model", tmp_path / "out")
    )
    changed = {name for name in last if not torch.equal(last[name], start[name])}
    assert changed and all("_proj" in name and "vision" not in name for name in changed)
    assert out.keys() == last.keys() == start.keys()
    assert all(torch.equal(out[name], last[name]) for name in last)
    lora = load_file(tuned / "adapter" / "adapter_model.safetensors")
    for name in changed:
        place = f"base_model.model.{name.removesuffix('.weight')}"
        A, B = (lora[f"{place}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(start[name] + 8.0 * B @ A, last[name], atol=1e-6, rtol=1e-5)


def test_peft_reads_the_adapter_onto_the_export(tuned, model_dir, tmp_path):
    """peft's own forward over transformers' copy of the start: the logits of the merged model."""
    from peft import PeftModel

    for source, name in ((model_dir, "start"), (tuned / "model", "merged")):
        assert cli.main(["export", str(source), "--to", str(tmp_path / name)]) == EXIT_OK
    read = lambda name: AutoModelForImageTextToText.from_pretrained(tmp_path / name, trust_remote_code=True)
    given = AutoProcessor.from_pretrained(tmp_path / "start", trust_remote_code=True)(text="say red 3, now")
    with torch.no_grad():
        base = read("start").eval()(**given).logits
        expected = read("merged").eval()(**given).logits
        found = PeftModel.from_pretrained(read("start"), tuned / "adapter").eval()(**given).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (base - expected).abs().max() > 100 * (found - expected).abs().max()


def test_a_stopped_stage_goes_on_bit_for_bit(tuned, chat_file, tmp_path, monkeypatch):
    words = (RANK, "--checkpoint.every 5")
    assert tune(chat_file, tmp_path / "cut", *words, "--steps 5", monkeypatch=monkeypatch) == 0
    assert tune(chat_file, tmp_path / "cut", *words, "--resume", monkeypatch=monkeypatch) == 0
    assert_same(tuned, tmp_path / "cut")
    first, last = (at / "adapter" / "adapter_model.safetensors" for at in (tuned, tmp_path / "cut"))
    assert first.read_bytes() == last.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--adapter.rank 0", "adapter.rank"),
        ("--adapter.rank 4 --parallel.dp_shard 2", "dp_shard = ep = pp = cp = 1"),
        ("--adapter.rank 4 --parallel.cp 2", "dp_shard = ep = pp = cp = 1"),
        ('--adapter.rank 4 --adapter.targets ["*.q_prjo"]', "did you mean 'q_proj'"),
    ],
)
def test_what_cannot_be_adapted_is_one_line(chat_file, words, said, tmp_path, capsys):
    assert cli.main(["sft", str(chat_file), *words.split(), "--out", str(tmp_path / "run")]) == EXIT_USER
    message = capsys.readouterr().err
    assert said in message and message.strip().count("\n") == 0


@pytest.mark.parametrize("sizes", [Sizes(dp_shard=2), Sizes(cp=2), Sizes(dp_shard=2, ep=2), Sizes(pp=2)])
def test_a_spread_model_is_refused_whoever_asks_for_it(sizes):
    """RL has no check of its own, and a launcher's sizes stand in no recipe. Replicas pass."""
    with pytest.raises(UserError, match="dp_shard, ep, pp and cp to 1"):
        check_plan(EVERYTHING, Layout(sizes, 0))
    check_plan(AdapterSection(), Layout(sizes, 0))
    check_plan(EVERYTHING, Layout(Sizes(dp_replicate=2), 0))


def test_without_peft_it_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'earlyfusion\[adapters\]'"):
        attach(build(tiny_fusion()), EVERYTHING)


def test_nothing_is_kept_where_a_gradient_is_wanted():
    """A sum that is kept while there is no gradient follows its parts, and is let go in training."""
    model = attach(build(tiny_fusion()), EVERYTHING)
    layer = next(iter(adapted(model).values()))
    with torch.no_grad():
        assert layer.weight is layer.weight
        before = layer.weight
        layer.lora_B.add_(0.1)
        assert not torch.equal(layer.weight, before)
    assert layer.weight.requires_grad and layer.kept is None
