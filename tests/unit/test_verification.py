"""Verification of faces: pairs, thresholds, folds and embeddings, each by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dcptool.cli import app
from dcptool.errors import InputError
from dcptool.network import models
from dcptool.training import verification

FOLDS, HALF = 10, 2


def face(path: Path, shade: int, size: tuple[int, int] = (96, 112)) -> None:
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(shade // 3).integers(0, 255, (size[1], size[0], 3))
    noise = np.random.default_rng(shade).integers(0, 20, pixels.shape)
    Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)).save(path)


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    """Six people with three faces each; faces of one person differ by noise alone."""
    for person in range(6):
        for number in range(1, 4):
            face(tmp_path / f"P{person}" / f"P{person}_{number:04d}.png", 3 * person + number - 1)
    lines = [f"{FOLDS}\t{HALF}"]
    for fold in range(FOLDS):
        one, other = fold % 6, (fold + 1) % 6
        lines += [f"P{one}\t1\t2", f"P{one}\t2\t3"]
        lines += [f"P{one}\t1\tP{other}\t1", f"P{one}\t2\tP{other}\t3"]
    (tmp_path / "pairs.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_pairs_and_folds(faces):
    pairs = verification.read_pairs(faces)
    assert len(pairs) == 40
    assert [pair.same for pair in pairs[:4]] == [True, True, False, False]
    assert [pair.fold for pair in pairs] == [i // 4 for i in range(40)]
    assert pairs[3].left == faces / "P0" / "P0_0002.png"
    assert pairs[3].right == faces / "P1" / "P1_0003.png"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10\t300\nP0\t1\t2\n", "1 pairs where 10 folds of 600"),
        ("2\t1\n" + "P0\t1\t2\n" * 3 + "P0\t1\n", "a line of 2 words"),
        ("2\t1\n" + "P0\t1\tx\n" * 4, "invalid literal"),
        ("2\t1\n" + "../P0\t1\t2\n" * 4, "no name of a person"),
        ("2\t1\n" + "P9\t1\t2\n" * 4, "a pair names it"),
    ],
)
def test_wrong_lists_are_refused(faces, text, words):
    (faces / "pairs.txt").write_text(text)
    with pytest.raises(InputError) as caught:
        verification.read_pairs(faces)
    assert words in caught.value.why


def slow_threshold(scores: np.ndarray, same: np.ndarray) -> int:
    cuts = [*scores, scores.max() + 1]
    return min(int(np.sum((scores >= cut) != same)) for cut in cuts)


def test_threshold_makes_fewest_mistakes():
    draw = np.random.default_rng(0)
    for _ in range(50):
        scores = np.round(draw.normal(size=30), 1)  # with ties
        same = draw.random(30) < 0.5
        threshold = verification.best_threshold(scores, same)
        assert int(np.sum((scores >= threshold) != same)) == slow_threshold(scores, same)


def test_each_fold_is_judged_by_the_others():
    # Fold 0 alone would like another threshold; the other nine decide for it.
    scores = np.array([0.3, 0.2] + [0.9, 0.5] * 9)
    same = np.array([True, False] * 10)
    found = verification.ten_folds(scores, same, np.repeat(np.arange(10), 2))
    assert found.folds[0] == 50.0
    assert found.folds[1:] == (100.0,) * 9
    assert found.accuracy == 95.0
    assert found.std == pytest.approx(15.0)


def test_embeddings_are_averaged_over_the_mirror_image(faces):
    network = models.load("zoo:spherenet4", pretrained=False, num_classes=7)
    path = faces / "P0" / "P0_0001.png"
    embed = verification.embedder(network)
    found = verification.embeddings([path], network.input, embed)[path]
    x = torch.from_numpy(np.asarray(Image.open(path), dtype=np.float32)).permute(2, 0, 1)[None]
    x = (x - 127.5) / 128
    bare = models.load("zoo:spherenet4", pretrained=False, num_classes=7).module.eval()
    bare.fc6 = torch.nn.Identity()
    with torch.no_grad():
        wanted = (bare(x) + bare(x.flip(3))) / 2
    assert torch.allclose(found, wanted[0], atol=1e-5)
    assert not torch.allclose(found, bare(x)[0].detach(), atol=1e-4)


def test_the_command(faces, capsys):
    words = ["evaluate", "zoo:spherenet4", "--no-pretrained", "--protocol", "lfw", "-q"]
    assert app.run([*words, "--num-classes", "7", "--data-dir", str(faces)]) == 0
    text = capsys.readouterr().out
    # Noise is told from another face even by random weights.
    assert text.startswith("verification 100.00 % (standard deviation 0.00 over 10 folds)")
    assert "40 pairs of 18 faces" in text
    assert app.run(words) == 2
    assert "needs --data-dir" in capsys.readouterr().err
    face(faces / "P0" / "P0_0001.png", 0, (100, 112))
    assert app.run([*words, "--num-classes", "7", "--data-dir", str(faces)]) == 3
    assert "aligned faces of 96 x 112 px are wanted" in capsys.readouterr().err
