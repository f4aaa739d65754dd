"""The loop against plain torch, and its promises: order of updates, resume, refusal of NaN."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from dcptool.errors import GateFailed, Interrupted, UsageError
from dcptool.network.models import Input
from dcptool.training import signals
from dcptool.training.checkpoint import Checkpoints
from dcptool.training.evaluate import evaluate, predictor
from dcptool.training.layout import apply_layout, choose_layout
from dcptool.training.loader import Augment, Batches, ImageSet, Store, loader
from dcptool.training.loop import Run, fit
from dcptool.training.losses import Outcome, cross_entropy, distill
from dcptool.training.metrics import Metrics
from dcptool.training.norms import reestimate_norms
from dcptool.training.optimizers import Optimizer
from dcptool.training.schedule import Schedule
from dcptool.training.settings import seconds_of, training_of
from dcptool.training.sources import Arrays


def images(count: int = 48, seed: int = 0) -> ImageSet:
    random = numpy.random.default_rng(seed)
    labels = random.integers(0, 3, count)
    pixels = random.integers(0, 100, (count, 8, 8))
    pixels[labels == 1, :4] += 150
    pixels[labels == 2, :, :4] += 150
    store = Store(
        Arrays(pixels.astype(numpy.uint8)), Input((3, 8, 8), (0.5,) * 3, (0.5,) * 3, crop_pct=1.0)
    )
    return ImageSet("train", store, numpy.arange(count), labels, Augment(pad=1))


def batches(size: int = 8) -> Batches:
    return loader(images(), size, train=True, seed=3)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def run(**options: object) -> Run:
    return Run(channels_last="off", **options)


def judge(module, stop):
    return evaluate(predictor(module), loader(images(seed=9), 16), 3, stop=stop)


def test_one_loss_is_plain_sgd() -> None:
    ours, theirs = model(), model()
    theirs.load_state_dict(ours.state_dict())
    ours[3].p = theirs[3].p = 0.0
    schedule = Schedule(12, 0.1, warmup_steps=3)
    fit(ours, batches(), [cross_entropy()], schedule, run())
    optimizer = torch.optim.SGD(
        theirs.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    theirs.train()
    step = 0
    for epoch in range(2):
        for shown, labels in batches().epoch(epoch):
            optimizer.param_groups[0]["lr"] = schedule.at(step)
            optimizer.zero_grad()
            functional.cross_entropy(theirs(shown.contiguous()), labels).backward()
            optimizer.step()
            step += 1
    assert step == 12
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_second_loss_sees_the_weights_after_the_first_update() -> None:
    weights: list[torch.Tensor] = []

    def spy(name: str):
        def loss(module, shown, labels):
            weights.append(module[0].weight.detach().clone())
            return Outcome(functional.cross_entropy(module(shown), labels))

        return loss

    fit(model(), batches(), [spy("head"), spy("final")], Schedule(2, 0.1, "constant"), run())
    assert len(weights) == 4
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_training_learns() -> None:
    ours = model()
    before = judge(ours, None).top1
    fitted = fit(ours, batches(), [cross_entropy()], Schedule(60, 0.05), run(validate=judge))
    assert fitted.best_top1 == judge(ours, None).top1 > max(85, before)
    assert not ours.training


def test_best_weights_may_be_the_first_ones() -> None:
    ours = model()
    fit(ours, batches(), [cross_entropy()], Schedule(60, 0.05), run(validate=judge))
    good = copy.deepcopy(ours.state_dict())
    harm = Schedule(12, 20.0, "constant")
    spoil = run(validate=judge, validate_first=True, clip_grad=1.0)
    fit(ours, batches(), [cross_entropy()], harm, spoil)
    assert all(
        torch.equal(a, b) for a, b in zip(good.values(), ours.state_dict().values(), strict=True)
    )


def stop_at(step: int):
    """A loss that raises a signal for this process at one step."""
    count = [0]
    plain = cross_entropy()

    def loss(module, shown, labels):
        count[0] += 1
        if count[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(module, shown, labels)

    return loss


def every(**changes: object) -> Run:
    settings: dict[str, object] = {
        "validate": judge,
        "ema_decay": 0.9,
        "clip_grad": 2.0,
        "log_every": 4,
        "resume_command": "dcptool finetune --resume x",
    }
    return run(**(settings | changes))


def test_a_resumed_run_ends_bit_equal(tmp_path: Path) -> None:
    schedule = Schedule(20, 0.1, warmup_steps=2)
    whole = model()
    fit(
        whole, batches(), [cross_entropy()], schedule, every(metrics=Metrics(_made(tmp_path / "a")))
    )
    broken = tmp_path / "b"
    broken.mkdir()

    def settings() -> Run:
        return every(
            checkpoints=Checkpoints(broken / "states", {"lr": "0.1"}), metrics=Metrics(broken)
        )

    for stop in (7, 6, 0):
        again = model(seed=stop)
        again.load_state_dict(model().state_dict())
        loss = stop_at(stop) if stop else cross_entropy()
        if stop:
            with pytest.raises(Interrupted) as caught:
                fit(again, batches(), [loss], schedule, settings())
            assert caught.value.code == 143
            assert "state saved" in caught.value.message
            assert caught.value.try_ == "dcptool finetune --resume x"
        else:
            fit(again, batches(), [loss], schedule, settings())
    for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)

    def rows(folder: Path) -> list[dict[str, object]]:
        timed = ("seconds", "images_per_second")
        return [{k: v for k, v in r.items() if k not in timed} for r in Metrics(folder).rows()]

    assert rows(broken) == rows(tmp_path / "a")


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_loss_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    states = Checkpoints(tmp_path, {}, every_s=0)
    count = [0]

    def loss(module, shown, labels):
        count[0] += 1
        outcome = cross_entropy()(module, shown, labels)
        return Outcome(outcome.loss * (math.nan if count[0] == 5 else 1))

    ours = model()
    with pytest.raises(GateFailed, match="nan at step 4"):
        fit(ours, batches(), [loss], Schedule(20, 0.1), run(checkpoints=states))
    saved = states.load()
    assert saved["step"] == 4
    assert all(torch.isfinite(value).all() for value in saved["model"].values())
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


@pytest.mark.parametrize("option", ["--lr", "--stage-lr"])
def test_a_loss_that_is_not_finite_names_the_option_of_the_rate(option: str) -> None:
    with pytest.raises(GateFailed) as caught:
        fit(model(), batches(), [cross_entropy()], Schedule(9, 1e30), run(lr_option=option))
    assert f"a smaller {option}, or" in caught.value.try_


def test_one_image_with_one_value_a_channel_names_the_options() -> None:
    small = nn.Sequential(nn.Conv2d(3, 6, 8), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 3))
    with pytest.raises(UsageError, match="one image at a time") as caught:
        fit(small, batches(1), [cross_entropy()], Schedule(2, 0.1), run())
    assert "--batch-size 2 or more, or --norms eval" in caught.value.try_
    with pytest.raises(UsageError, match="one image at a time"):
        reestimate_norms(small, batches(1))
    fit(small, batches(1), [cross_entropy()], Schedule(2, 0.1), run(norms="eval"))


def test_time_ends_a_run_in_order() -> None:
    fitted = fit(
        model(),
        batches(),
        [cross_entropy()],
        Schedule(10_000, 0.1),
        run(max_time_s=0.3, validate=judge),
    )
    assert fitted.ended_by == "max-time"
    assert 0 < fitted.steps < 10_000
    assert fitted.best_top1 is not None


def test_frozen_norms_keep_their_statistics() -> None:
    ours = model()
    before = ours[1].running_mean.clone()
    fit(ours, batches(), [cross_entropy()], Schedule(3, 0.1), run(norms="eval"))
    assert torch.equal(before, ours[1].running_mean)


def test_the_callers_random_numbers_are_left_alone() -> None:
    ours = model()
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    fit(ours, batches(), [cross_entropy()], Schedule(3, 0.1), run())
    assert torch.equal(torch.rand(3), wanted)


def test_channels_last_is_chosen_and_undone() -> None:
    ours = model()
    fitted = fit(ours, batches(), [cross_entropy()], Schedule(2, 0.1), Run(channels_last="on"))
    assert fitted.channels_last
    assert ours[0].weight.is_contiguous()
    auto = fit(ours, batches(), [cross_entropy()], Schedule(2, 0.1), Run(channels_last="auto"))
    assert auto.channels_last in (True, False)


def test_a_measured_layout_is_on_the_disk_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Checkpoints(tmp_path, {})
    asked: list[bool] = []

    def measured(_model: nn.Module, _batches: Batches, wish: str) -> bool:
        asked.append(not asked)  # another answer each time
        return asked[-1] and wish == "auto"

    class Killed(Exception):
        pass

    def die(*_: object) -> Outcome:
        raise Killed

    monkeypatch.setattr("dcptool.training.loop.choose_layout", measured)
    auto = Run(channels_last="auto", checkpoints=place, seed=1)
    with pytest.raises(Killed):
        fit(model(), batches(), [die], Schedule(100, 0.1), auto)
    assert fit(model(), batches(), [cross_entropy()], Schedule(100, 0.1), auto).channels_last
    assert len(asked) == 1


def test_measuring_the_layout_changes_no_weight_and_no_statistic() -> None:
    ours = model()
    before = copy.deepcopy(ours.state_dict())
    choose_layout(ours, batches(), "auto")
    apply_layout(ours, False)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), ours.state_dict().values(), strict=True)
    )


def test_mixed_precision_and_other_optimizers() -> None:
    ours = model()
    settings = run(amp=torch.bfloat16, optimizer=Optimizer("adamw", weight_decay=0.01))
    fit(ours, batches(), [cross_entropy(0.1)], Schedule(60, 0.01), settings)
    assert judge(ours, None).top1 > 80
    with pytest.raises(UsageError, match="unknown optimizer"):
        fit(ours, batches(), [cross_entropy()], Schedule(1, 0.1), run(optimizer=Optimizer("sdg")))


def test_mixup_and_erasing_train() -> None:
    training = training_of({"mixup": 0.2, "cutmix": 0.5, "batch_size": 8, "smoothing": 0.1})
    vary = training.vary(Augment(reprob=0.5), 3)
    ours = model()
    fit(ours, batches(), [cross_entropy()], Schedule(60, 0.05), run(vary=vary))
    assert judge(ours, None).top1 > 60


def test_weight_decay_can_leave_norms_alone() -> None:
    groups = Optimizer(decay_norms=False).make(model(), 0.1).param_groups
    assert sorted({group["weight_decay"] for group in groups}) == [0.0, 1e-4]
    free = next(g for g in groups if g["weight_decay"] == 0.0)
    assert all(p.dim() <= 1 for p in free["params"])
    assert len(Optimizer().make(model(), 0.1).param_groups) == 1


def test_distillation_without_labels_follows_the_teacher() -> None:
    teacher = model()
    fit(teacher, batches(), [cross_entropy()], Schedule(60, 0.05), run())
    pupil = model(seed=7)
    unlabelled = dataclasses.replace(images(), labels=numpy.full(48, -1))
    loss = distill(teacher, labelled=False)
    fit(pupil, loader(unlabelled, 8, train=True), [loss], Schedule(90, 0.05), run())
    shown, _ = next(iter(loader(images(seed=9), 48)))
    same = predictor(pupil)(shown).argmax(1) == predictor(teacher)(shown).argmax(1)
    assert same.float().mean() > 0.85
    assert all(p.grad is None for p in teacher.parameters()) or not teacher.training


def test_distillation_is_the_divergence_it_says() -> None:
    pupil, teacher = model(1).eval(), model(2).eval()
    shown, labels = next(iter(loader(images(), 8)))
    found = distill(teacher, weight=0.3, temperature=4.0)(pupil, shown, labels).loss
    p = functional.softmax(teacher(shown) / 4, 1)
    q = functional.softmax(pupil(shown) / 4, 1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    wanted = 0.3 * 16 * divergence + 0.7 * functional.cross_entropy(pupil(shown), labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_norms_are_estimated_as_plain_averages() -> None:
    ours = model()
    ours[1].running_mean.fill_(9.0)
    weights = ours[0].weight.detach().clone()
    plain = loader(images(), 12)
    assert reestimate_norms(ours, plain) == 1
    means = [ours[0](shown).mean((0, 2, 3)) for shown, _ in plain]
    assert torch.allclose(ours[1].running_mean, torch.stack(means).mean(0), atol=1e-5)
    assert torch.equal(ours[0].weight, weights)
    assert ours[1].momentum == 0.1


def test_a_last_image_alone_joins_the_batch_before() -> None:
    ours, sizes = model(), []
    ours.register_forward_pre_hook(lambda _m, given: sizes.append(len(given[0])))
    reestimate_norms(ours, loader(images(25), 12))
    assert sizes == [12, 13]


@pytest.mark.parametrize(
    ("schedule", "step", "wanted"),
    [
        (Schedule(100, 1.0), 0, 1.0),
        (Schedule(100, 1.0), 50, 0.5),
        (Schedule(100, 1.0), 100, 0.0),
        (Schedule(100, 1.0, warmup_steps=9), 4, 0.5),
        (Schedule(100, 1.0, "step", milestones=(0.4, 0.6)), 39, 1.0),
        (Schedule(100, 1.0, "step", milestones=(0.4, 0.6)), 40, 0.1),
        (Schedule(100, 1.0, "step", milestones=(0.4, 0.6)), 99, 0.01),
        (Schedule(100, 1.0, "constant"), 99, 1.0),
        (Schedule(100, 1.0, "exponential", decay=0.9), 2, 0.81),
    ],
)
def test_learning_rates(schedule: Schedule, step: int, wanted: float) -> None:
    assert schedule.at(step) == pytest.approx(wanted)


def test_the_papers_schedule() -> None:
    training = training_of(
        {
            "epochs": 400,
            "lr": 0.1,
            "sched": "step",
            "decay_milestones": "160,240",
            "warmup_epochs": 0,
        }
    )
    schedule = training.schedule(391, fresh=False)
    assert schedule.steps == 400 * 391
    rates = [schedule.at(epoch * 391) for epoch in (0, 159, 160, 239, 240, 399)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_options_are_judged_together() -> None:
    with pytest.raises(UsageError) as caught:
        training_of({"epochs": 3, "steps": 5, "mixup": 0.1, "batch_size": 7})
    assert "--epochs and --steps" in caught.value.why
    assert "even --batch-size" in caught.value.why
    assert [seconds_of(text) for text in ("90", "90s", "20m", "1.5h")] == [90, 90, 1200, 5400]
    with pytest.raises(UsageError):
        seconds_of("soon")


def test_a_second_signal_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals.watch() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.number == signal.SIGINT
        with pytest.raises(Interrupted, match="at once"):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
