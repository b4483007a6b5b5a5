"""The example of LoRA adapters: with models made from configs, nothing is downloaded."""

# ruff: noqa: E402  (whether the libraries are there decides whether the rest is imported)

from __future__ import annotations

import functools
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

for library in ("datasets", "peft", "transformers"):
    pytest.importorskip(library, exc_type=ImportError)

import tokenizers
from flwr.app import Context, Message, RecordDict
from peft import PeftModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import fedcams
import federate
from flower_apps import client_app, quick  # noqa: F401  (a fixture)
from flower_grid import LocalGrid
from lora_app import client_app as site
from lora_app import server_app
from lora_app.adapters import adapters_of, load_adapters_, make_model, site_data, small

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # of transformers, for peft
)
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, DOCS = ROOT / "examples" / "lora", ROOT / "docs"
tiny = functools.partial(make_model, width=16, layers=1)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# -- one process -----------------------------------------------------------------------------------------------------


def test_only_adapters_train_and_travel() -> None:
    model = tiny()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    history = federate.federate(model, 2, federate.DENSE)
    adapters = sum(value.numel() for value in adapters_of(model).values())
    assert fedcams.Layout.of(history.model).d == adapters < sum(value.numel() for value in frozen.values()) / 2
    for record in history.records:
        assert 4 * adapters * 4 <= record.wire_up < 4 * adapters * 4 + 4 * 2000, "four clients, float32, and headers"
    after = dict(history.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    start, end = adapters_of(model), adapters_of(history.model)
    assert not any(torch.equal(start[name], end[name]) for name in start), "all adapters were trained"
    assert history.records[-1].test_loss < history.records[0].train_loss


def test_the_example_counts_saves_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federate.main(3, tmp_path, tiny)
    said = capsys.readouterr().out.splitlines()
    sizes = [int(line.split("|")[2].replace(",", "")) for line in said if line.startswith(("| the whole", "| LoRA"))]
    whole, dense, light = sizes
    assert whole > dense > 5 * light
    loaded = PeftModel.from_pretrained(tiny().unload(), tmp_path)
    tokens = torch.tensor([site_data(0)[0]["input_ids"]])
    assert not torch.equal(loaded(tokens).logits, tiny()(tokens).logits), "it was trained"


def test_other_ranks_are_refused_by_name() -> None:
    name = r"'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'"
    with pytest.raises(ValueError, match=rf"{name} is \[4, 32\] at this site and \[8, 32\] at the server; give all"):
        load_adapters_(tiny(4), adapters_of(tiny(8)))


def test_the_how_to_works_with_weights_and_text_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for the folder of the base model, the device and the numbers of rounds and tokens."""
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(small(16, 1)).save_pretrained("base")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[END]": 0, "[UNK]": 1, "the": 2, "sea": 3}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]").save_pretrained("base")
    for name in ("berlin", "lyon", "oslo", "test"):
        Path(f"{name}.txt").write_text("the sea\nthe other sea and the road\n" * 3)
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "adapters.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    for shown, used in {"/models/my-llama": "base", '"cuda"': '"cpu"', "rounds=50": "rounds=2", ": 256": ": 8"}.items():
        assert shown in snippet
        snippet = snippet.replace(shown, used)
    names: dict[str, Any] = {}
    exec(compile(snippet, "adapters.md", "exec"), names)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert [record.round for record in names["history"].records] == [1, 2]
    first = names["examples"]("test.txt")[0]
    assert first["labels"] == [2, 3, *[-100] * 6], "padding does not count"


# -- over Flower -----------------------------------------------------------------------------------------------------


class ConfiguredGrid(LocalGrid):
    """Nodes that know the run's configuration."""

    config: dict[str, Any]

    def received(self, message: Message) -> tuple[Message, Context]:
        taken, context = super().received(message)
        context.run_config = self.config
        return taken, context


def run_app(folder: Path, ranks: tuple[int, ...], **changes: Any) -> Path:
    """Run the app as its pyproject.toml configures it, one site per rank; return the folder of the adapters."""
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"checkpoint": str(folder / "server"), "adapters": str(folder / "adapters"), "deadline": 30.0, **changes}
    app = client_app(folder / "sites", site.train, initial=site.initial)
    nodes: dict[int, dict[str, Any]] = {100 + i: {"site-id": i, "rank": rank} for i, rank in enumerate(ranks)}
    grid = ConfiguredGrid(dict.fromkeys(nodes, app), nodes)
    grid.config = config
    server_app.main(grid, Context(1, 0, {}, RecordDict(), config))
    return folder / "adapters"


def test_the_app_trains_and_saves_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    saved = run_app(tmp_path, (8, 8), rounds=2)
    assert sorted(path.name for path in saved.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded, start = adapters_of(PeftModel.from_pretrained(tiny().unload(), saved)), adapters_of(tiny())
    assert loaded.keys() == start.keys()
    # B starts at zero, so the first and largest changes are its own
    assert not any(torch.equal(loaded[name], start[name]) for name in start if "lora_B" in name)


@pytest.mark.parametrize("recipe", ["lighter", "one-way"])
def test_a_site_with_another_rank_is_refused_and_the_others_go_on(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the mod, which compares initial models, or by the app."""
    shrink(monkeypatch)
    with caplog.at_level(logging.INFO):
        saved = run_app(tmp_path, (8, 4), rounds=1, recipe=recipe)
    assert saved.exists()
    assert "1 accepted, 1 refused" in caplog.text or "1 accepted, 1 failed" in caplog.text
    (said,) = (record.getMessage() for record in caplog.records if "client 1" in record.getMessage())
    assert re.search(r"'base_model.model.\S+.lora_[AB].weight'", said)
    shapes = re.findall(r"[\[(]\d+, \d+[\])]", said)
    assert len({shape[1:-1] for shape in shapes}) == 2, said


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (site, server_app):
        monkeypatch.setattr(module, "make_model", tiny)
