"""Union-find over labels: ties, reasons, spreading."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcptool.network.labels import LARGE, Ties, compact, is_constant, respread, shrink, spread


def test_fresh_labels_are_units_of_their_own() -> None:
    ties = Ties()
    first, second = ties.fresh(3), ties.fresh(2)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4]
    assert ties.roots(torch.cat([first, second])).tolist() == [0, 1, 2, 3, 4]


def test_labels_outgrow_the_first_block_of_memory() -> None:
    ties = Ties()
    labels = ties.fresh(5000)
    ties.join(labels[:1], labels[-1:])
    assert ties.roots(labels)[-1] == 0


def test_join_takes_the_smallest_label_as_root() -> None:
    ties = Ties()
    labels = ties.fresh(6)
    ties.join(labels[3:], labels[:3])
    assert ties.roots(labels).tolist() == [0, 1, 2, 0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
def test_join_is_the_transitive_closure(pairs: list[tuple[int, int]]) -> None:
    ties = Ties()
    labels = ties.fresh(20)
    sets = [{i} for i in range(20)]
    for one, other in pairs:
        ties.join(labels[one : one + 1], labels[other : other + 1])
        union = sets[one] | sets[other]
        for member in union:
            sets[member] = union
    assert ties.roots(labels).tolist() == [min(sets[i]) for i in range(20)]


def test_reasons_follow_a_join_and_are_not_mixed() -> None:
    ties = Ties()
    labels = ties.fresh(4)
    ties.freeze(labels[1:2], "because of one")
    ties.freeze(labels[3:4], "because of three")
    ties.join(labels[:2], labels[2:])
    assert ties.frozen(0) == []
    assert ties.frozen(1) == ["because of one", "because of three"]


def test_a_fixed_partner_freezes_and_does_not_unite() -> None:
    ties = Ties()
    labels = ties.fresh(2)
    fixed = torch.full((2,), ties.fixed("the image"))
    ties.join(labels, fixed)
    assert ties.roots(labels).tolist() == [0, 1]
    assert ties.frozen(0) == ties.frozen(1) == ["the image"]
    assert ties.roots(fixed).tolist() == fixed.tolist()


def test_several_fixed_reasons_stay_apart() -> None:
    ties = Ties()
    labels = ties.fresh(2)
    ties.fixed("one")
    ties.join(labels[1:], torch.tensor([ties.fixed("two")]))
    assert ties.frozen(0) == []
    assert ties.frozen(1) == ["two"]


def test_additions_are_remembered_through_later_ties() -> None:
    ties = Ties()
    labels = ties.fresh(3)
    ties.join(labels[1:2], labels[2:3], added_at="add_1")
    ties.join(labels[:1], labels[1:2])
    assert ties.added(0) == "add_1"


def test_spread_repeats_and_compact_undoes_it() -> None:
    wide = spread(torch.arange(4), (1, 4, 5, 6), 1)
    assert wide.shape == (1, 4, 5, 6)
    assert wide[0, :, 2, 3].tolist() == [0, 1, 2, 3]
    assert compact(wide).shape == (1, 4, 1, 1)


def test_respread_makes_copied_repetition_visible() -> None:
    ties = Ties()
    copied = spread(ties.fresh(4), (1, 4, 5, 6), 1).contiguous()
    assert compact(respread(ties, copied)).shape == (1, 4, 1, 1)


def test_constancy_is_about_units_not_labels() -> None:
    ties = Ties()
    labels = ties.fresh(6).reshape(1, 3, 2)
    assert not is_constant(ties, labels, (2,))
    ties.join(labels[..., 0], labels[..., 1])
    assert is_constant(ties, labels, (2,))
    assert not is_constant(ties, labels, (1,))


def test_large_tensors_shrink_by_units() -> None:
    ties = Ties()
    labels = ties.fresh(2 * LARGE).reshape(1, 4, -1)
    assert shrink(ties, labels).shape == labels.shape
    ties.join(labels, labels[..., :1].expand_as(labels))
    small = shrink(ties, labels)
    assert small.shape == (1, 4, 1)
    assert torch.equal(small, ties.roots(labels)[..., :1])
