"""What the environment keeps secret stays there: no file of a run and no message has it."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest

from dcptool.network import fetch

SECRETS = {
    "HF_TOKEN": "hf_5ecretT0ken",
    "WANDB_API_KEY": "wandb5ecret",
    "AWS_SECRET_ACCESS_KEY": "aws5ecret",
    "HTTPS_PROXY": "http://user:pr0xy5ecret@127.0.0.1:9",
    "HTTP_PROXY": "http://user:pr0xy5ecret@127.0.0.1:9",
    "HF_ENDPOINT": "http://user:endp0int5ecret@127.0.0.1:9",
}
WORDS = ("hf_5ecretT0ken", "5ecret")
RECIPE = """
[model]
name = "zoo:resnet20"
pretrained = false
[data]
images = "photos"
[prune]
rate = 0.5
training = false
samples = 4
positions = 4
[finetune]
steps = 2
batch_size = 4
"""
BUG = """
import tempfile
tempfile.tempdir = None
from dcptool.pipeline import rundir
def broken(*_, **__):
    raise KeyError("a bug")
rundir.runs_folder = broken
"""


def test_secrets_reach_no_file_and_no_message(
    server: forked.Server, slim: Path, tmp_path: Path
) -> None:
    (tmp_path / "photos").symlink_to(slim.parent / "photos")
    (tmp_path / "mine.toml").write_text(RECIPE)
    home = tmp_path / "home"
    (home / "tmp").mkdir(parents=True)
    private = {**SECRETS, "HOME": str(home), "TMPDIR": str(home / "tmp")}
    for words, code, fault in (
        (("run", "mine.toml", "-v", "--json"), 0, ""),
        (("report", "--card"), 0, ""),
        (("env", "-v"), 0, ""),
        (("export", "nothing", "--debug"), 2, ""),
        (("export", "--debug"), 1, BUG),
    ):
        done = server.run(*words, cwd=tmp_path, code=fault, timeout=120, **private)
        assert done.code == code, done.err
        assert not any(word in done.out + done.err for word in WORDS), words
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"report.html", "README.md", "manifest.json"} <= {path.name for path in files}
    assert list((home / "tmp").glob("dcptool-*.log")), "the log of the bug is looked at too"
    for path in files:
        content = path.read_bytes()
        assert not any(word.encode() in content for word in WORDS), path
        if path.suffix in (".json", ".html", ".md"):
            assert str(home).encode() not in content, path


@pytest.mark.parametrize("name", ["hf-hub:someone/something", "torchvision:resnet18"])
def test_addresses_are_told_without_passwords(
    name: str, server: forked.Server, tmp_path: Path
) -> None:
    private = {**SECRETS, "HOME": str(tmp_path), "DCPTOOL_OFFLINE": "", "HF_HUB_OFFLINE": ""}
    done = server.run("analyze", name, "-v", "--debug", cwd=tmp_path, **private)
    said = done.out + done.err
    assert "5ecret" not in said
    words = ("export", name, "--onnx", "x.onnx", "--debug")
    weights = server.run(*words, cwd=tmp_path, **private)
    assert weights.code == 5, weights.err
    assert not (tmp_path / "x.onnx").exists()
    assert "5ecret" not in weights.out + weights.err


def test_an_address_with_a_password_is_told_without_it() -> None:
    place = fetch.Place("https://user:5ecret@example.org/weights-12345678.pth?token=5ecret")
    told = fetch.unreachable(place, "no route").lines()
    assert "5ecret" not in told
    assert "example.org/weights-12345678.pth" in told
